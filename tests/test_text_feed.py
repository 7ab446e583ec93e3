"""Following text: what is pushed, what is found by reading when a push is lost, and what cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from headrace.shared import keys
from headrace.shared.chunks import Finish, TextChunk, Usage
from headrace.shared.clients import AsyncClient, connect_async
from headrace.shared.errors import ProtocolError, StreamGone
from headrace.shared.following import Following, Retelling
from headrace.shared.ids import family_from
from headrace.shared.text_feed import REPAIR_EVERY_S, TextFeed
from headrace.shared.text_stream import Position
from hypothesis import assume, given
from hypothesis import strategies as st

A, B = (f"{family_from(name, 1)}.0" for name in "ab")
END = TextChunk(A, 0, "text", Usage(1, 1), seq=1, finish=Finish("stop"))


async def put(client: AsyncClient, rid: str, meta: bytes) -> None:
    """An entry that no push tells of."""
    await client.hset(keys.request(0, rid), mapping={"st": "run", "o": 4, "xk": 1})
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
        async with feed.follow([B]):
            await asyncio.sleep(REPAIR_EVERY_S / 20)


def test_a_lost_push_is_found_while_others_keep_the_feed_busy(redis_url: str) -> None:
    async def go() -> list[str]:
        async with opened(redis_url) as (client, feed):
            await client.hset(keys.request(0, B), mapping={"st": "run", "o": 0, "xk": 0})
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
            async with feed.follow([B]) as broken:
                with pytest.raises(ProtocolError):
                    await texts(broken)
            await put(client, A, END.encode_meta())
            async with feed.follow([A]) as following, asyncio.timeout(30):
                return await texts(following)

    assert asyncio.run(go()) == ["text"]


def chunk(offset: int, text: str, seq: int = 1, finish: Finish | None = None, **more: Any) -> TextChunk:
    return TextChunk(A, offset, text, Usage(1, 1), seq, finish=finish, **more)


STOP = Finish("stop")
SHOWN = [chunk(0, "Grü"), chunk(4, "ße, "), chunk(9, "W")]


def follower(*shown: TextChunk) -> Following:
    following = Following([A], room=lambda: None, pause=lambda: None)
    for one in shown:
        following.read(one, 1)
    return following


def retell(following: Following, *chunks: TextChunk) -> Following:
    following.doubt()
    told = following.retell(A)
    for one in chunks:
        if A in following.doubted and A in following.open:
            following.retold(one, told, 1)
        else:
            following.read(one, 1)
    return following


def seen(following: Following) -> str:
    async def go() -> str:
        return "".join(await texts(following))

    return asyncio.run(go())


def test_a_push_is_taken_where_it_follows() -> None:
    following = follower()
    assert following.offer(chunk(0, "one"), Position(), 1)
    assert following.offer(chunk(0, "one"), Position(), 1), "it was had: nothing is missing"
    assert not following.offer(chunk(9, "four"), Position(9, 1), 1)
    assert following.positions[A] == Position(3, 1)
    assert following._ready.qsize() == 1


def test_what_was_read_goes_on_where_we_stand_or_is_doubted() -> None:
    following = follower(chunk(0, "one"), chunk(0, "one"))
    assert not following.doubted, "it was had: nothing is lost"
    following.read(chunk(2, "e two"), 1)
    assert following.doubted == {A}
    assert following.positions[A] == Position(3, 1)


@pytest.mark.parametrize(
    ("again", "whole"),
    [
        ([*SHOWN, chunk(10, "elt", finish=STOP)], "Grüße, Welt"),
        ([chunk(0, "Grü"), chunk(4, "ße, Wél"), chunk(13, "t", finish=STOP)], "Grüße, Wélt"),
        ([chunk(0, "Grüße, W"), chunk(10, "elt", finish=STOP)], "Grüße, Welt"),
        ([chunk(0, "Grüße, "), chunk(9, "W", finish=STOP)], "Grüße, W"),
        ([chunk(0, "Grüße, Welt", finish=STOP)], "Grüße, Welt"),
        ([*SHOWN, chunk(10, "", seq=2, finish=STOP)], "Grüße, W"),
    ],
    ids=[
        "the same chunks",
        "cut otherwise",
        "cut as we are",
        "our last chunk again, and an end",
        "one chunk",
        "an end",
    ],
)
def test_what_was_made_again_goes_on_behind_what_was_shown(again: list[TextChunk], whole: str) -> None:
    following = retell(follower(*SHOWN), *again)
    assert seen(following) == whole


def test_an_end_at_our_byte_whose_place_is_before_ours_is_taken() -> None:
    shown = [chunk(0, "text"), chunk(4, "", seq=2)]
    assert seen(retell(follower(*shown), chunk(0, "te"), chunk(2, "xt", finish=STOP))) == "text"


def test_what_is_not_yet_made_again_is_waited_for() -> None:
    following = retell(follower(*SHOWN), SHOWN[0])
    assert (following.open, following.doubted) == ({A}, {A})
    assert following.offer(chunk(10, "xyz"), Position(10, 1), 1), "nothing is taken, nor asked for, before it is known"
    assert following.positions[A] == Position(10, 1)
    assert seen(retell(following, *SHOWN, chunk(10, "elt", finish=STOP))) == "Grüße, Welt"


@pytest.mark.parametrize(
    "again",
    [
        [chunk(0, "Grü"), chunk(4, "n ist alles", finish=STOP)],
        [chunk(0, "Grün ist "), chunk(10, "alles", finish=STOP)],
        [chunk(0, "Grüße, V"), chunk(10, "elt", finish=STOP)],
        [chunk(0, "Grü"), chunk(4, "ße", finish=STOP)],
        [chunk(0, "Grü", token_ids=(1, 2)), chunk(4, "ße, Welt", token_ids=(3, 4), finish=STOP)],
    ],
    ids=["another text", "of the same length", "at the same place", "an end before ours", "ids that cannot be cut"],
)
def test_what_cannot_go_on_is_an_error_and_no_splice(again: list[TextChunk]) -> None:
    following = retell(follower(*SHOWN), *again)
    with pytest.raises(StreamGone, match="send the request again") as lost:
        seen(following)
    assert lost.value.code == "stream_lost"


@given(st.text(min_size=1), st.text(), st.data())
def test_the_same_text_goes_on_however_it_was_cut(shown: str, more: str, data: st.DataObject) -> None:
    following = follower(*cut(shown, data, end=False))
    retell(following, *cut(shown + more, data, end=True))
    assert seen(following) == shown + more


@given(st.text(min_size=1), st.text(min_size=1), st.data())
def test_another_text_never_does(shown: str, other: str, data: st.DataObject) -> None:
    assume(not other.startswith(shown))
    following = follower(*cut(shown, data, end=False))
    with pytest.raises(StreamGone):
        seen(retell(following, *cut(other, data, end=True)))


def cut(text: str, data: st.DataObject, *, end: bool) -> list[TextChunk]:
    """A text's chunks, as a detokenizer numbers them."""
    places = sorted({0, *data.draw(st.lists(st.integers(0, len(text)), max_size=4)), len(text)})
    chunks = [chunk(len(text[:a].encode()), text[a:b]) for a, b in itertools.pairwise(places)]
    if end:
        joined: bool = data.draw(st.booleans())
        if chunks and joined:
            chunks[-1] = replace(chunks[-1], finish=STOP)
        else:
            chunks.append(chunk(len(text.encode()), "", seq=2, finish=STOP))
    return chunks


def test_a_retelling_knows_its_place_from_the_start() -> None:
    told = Retelling(Position(), 0)
    assert told.met
    assert told.beyond(chunk(0, "a")) == chunk(0, "a")


def test_a_tail_that_the_store_lost_is_found_by_reading(redis_url: str) -> None:
    async def go() -> list[str]:
        async with opened(redis_url) as (client, feed):
            await put(client, A, chunk(0, "text").encode_meta())
            async with feed.follow([A]) as following, asyncio.timeout(30):
                while not following.positions[A].end:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
                await client.delete(keys.text(0, A))
                await client.hset(keys.request(0, A), mapping={"o": 2, "xk": 1})
                await client.xadd(keys.text(0, A), {"d": b"te", "m": chunk(0, "te").encode_meta()}, id="2-1")
                while not following.doubted:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
                await client.xadd(keys.text(0, A), {"d": b"xts", "m": chunk(2, "xts").encode_meta()}, id="5-1")
                await client.xadd(keys.text(0, A), {"d": b"", "m": END.encode_meta()}, id="5-2")
                await client.hset(keys.request(0, A), mapping={"st": "done", "o": 5, "xk": 2})
                return await texts(following)

    assert asyncio.run(go()) == ["text", "s", ""]


def test_a_lost_connection_has_everything_compared(redis_url: str) -> None:
    """What came back may be as long as what was shown, and another text."""

    async def go() -> None:
        async with opened(redis_url) as (client, feed):
            await put(client, A, chunk(0, "text").encode_meta())
            async with feed.follow([A]) as following, asyncio.timeout(30):
                while not following.positions[A].end:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
                await client.delete(keys.text(0, A))
                await client.xadd(keys.text(0, A), {"d": b"next", "m": END.encode_meta()}, id="4-1")
                await client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                await texts(following)

    with pytest.raises(StreamGone, match="has lost"):
        asyncio.run(go())
