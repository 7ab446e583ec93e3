"""Following text: what is pushed, what is found by reading when a push is lost, and what cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from headrace.shared import keys
from headrace.shared.chunks import Finish, TextChunk, Usage
from headrace.shared.clients import AsyncClient, connect_async
from headrace.shared.errors import ProtocolError
from headrace.shared.following import Following
from headrace.shared.ids import family_from
from headrace.shared.text_feed import REPAIR_EVERY_S, TextFeed

A, B = (f"{family_from(name, 1)}.0" for name in "ab")
END = TextChunk(A, 0, "text", Usage(1, 1), seq=1, finish=Finish("stop"))


async def put(client: AsyncClient, rid: str, meta: bytes) -> None:
    """An entry that no push tells of."""
    await client.hset(keys.request(0, rid), "st", "run")
    await client.xadd(keys.text(0, rid), {"d": b"text", "m": meta}, id="4-1")


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[AsyncClient, TextFeed]]:
    client = connect_async(url)
    try:
        async with TextFeed(client, 1, "me") as feed:
            while not await client.pubsub_channels():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # having subscribed, it reads for those who followed before
            yield client, feed
    finally:
        await client.aclose()


async def texts(following: Following) -> list[str]:
    return [chunk.text async for chunk in following]


async def arrivals(feed: TextFeed) -> None:
    """Clients that come at such a rate that there is always somebody to be read for."""
    while True:
        async with feed.follow([B], {}):
            await asyncio.sleep(REPAIR_EVERY_S / 20)


def test_a_lost_push_is_found_while_others_keep_the_feed_busy(redis_url: str) -> None:
    async def go() -> list[str]:
        async with opened(redis_url) as (client, feed):
            await client.hset(keys.request(0, B), "st", "run")
            busy = asyncio.create_task(arrivals(feed))
            try:
                async with feed.follow([A]) as following, asyncio.timeout(30):
                    await put(client, A, END.encode_meta())
                    return await texts(following)
            finally:
                busy.cancel()

    assert asyncio.run(go()) == ["text"]


def test_an_entry_that_cannot_be_read_fails_its_own_reader_alone(redis_url: str) -> None:
    async def go() -> list[str]:
        async with opened(redis_url) as (client, feed):
            await put(client, B, b"{damaged")
            async with feed.follow([B], {}) as broken:
                with pytest.raises(ProtocolError):
                    await texts(broken)
            await put(client, A, END.encode_meta())
            async with feed.follow([A], {}) as following, asyncio.timeout(30):
                return await texts(following)

    assert asyncio.run(go()) == ["text"]
