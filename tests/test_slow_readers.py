"""Clients that do not read: what they cost is bounded, they are cut off in the end, and lose nothing by it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from headrace.shared import following, keys, text_feed
from headrace.shared.chunks import Finish, TextChunk, Usage
from headrace.shared.clients import connect_async
from headrace.shared.ids import family_from
from headrace.shared.text_feed import TextFeed
from kit.deployment import Deployment
from kit.serving import wait_until

A = f"{family_from('a', 1)}.0"
PIECES, SIZE = 400, 1000
TOKENS, CHOICES = 500, 40  # more bytes than the kernel holds for a connection


async def publish(client: Any, number: int) -> None:
    """A chunk of `SIZE` bytes, pushed and kept as publish.lua does."""
    before = number * SIZE
    end = Finish("stop") if number == PIECES - 1 else None
    chunk = TextChunk(A, before, "x" * SIZE, Usage(1, number + 1), finish=end)
    meta, text = chunk.encode_meta(), f"{number:0{SIZE}}".encode()
    await client.xadd(keys.text(0, A), {"d": text, "m": meta}, id=f"{before + SIZE}-1")
    await client.hset(keys.request(0, A), mapping={"o": before + SIZE, "xk": 1})
    head = f"{A} {before} {min(number, 1)} 1 {len(meta)}\n".encode()
    await client.publish(keys.reader_channel(0, "me"), head + meta + text)


def test_what_waits_for_a_client_is_bounded_and_nothing_is_lost(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "HELD_BYTES", 20 * SIZE)
    monkeypatch.setattr(text_feed, "READ_ENTRIES", 16)
    pauses = []

    async def go() -> list[int]:
        client = connect_async(redis_url)
        async with TextFeed(client, 1, "me") as feed, asyncio.timeout(60):
            feed.on_pause = lambda: pauses.append(1)
            await client.hset(keys.request(0, A), mapping={"st": "run", "o": 0, "xk": 0})
            while not await client.pubsub_channels():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
            async with feed.follow([A]) as reader:
                for number in range(PIECES):
                    await publish(client, number)
                while not reader.paused:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.01)
                await asyncio.sleep(2 * text_feed.REPAIR_EVERY_S)  # a repair must not take what a push may not
                got, most = [], reader._ready.qsize()
                async for chunk in reader:
                    got.append(int(chunk.text))
                    await asyncio.sleep(0)
                    most = max(most, reader._ready.qsize())
                assert most <= 22  # twenty fit, one is over, one is in hand
        await client.aclose()
        return got

    assert asyncio.run(go()) == list(range(PIECES))
    assert len(pauses) > 5


def refuses_to_read(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that asks for a stream and takes nothing of it."""
    place = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.connect((place.hostname, place.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    client.sendall(head.encode() + b"\r\n\r\n" + data)
    return client


def drain(client: socket.socket) -> bytes:
    """What the kernel still holds of the connection."""
    got = bytearray()
    client.settimeout(30)
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionError:
        pass
    return bytes(got)


def slow_readers(http: httpx.Client, what: str) -> float:
    name = f'headrace_slow_readers_total{{what="{what}"}}'
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def texts_of(events: list[str]) -> list[str]:
    texts = [""] * CHOICES
    for event in events:
        data = event.partition("data: ")[2]
        for choice in json.loads(data)["choices"] if data not in ("", "[DONE]") else ():
            texts[choice["index"]] += choice["text"]
    return texts


def test_a_client_that_does_not_read_is_cut_off_and_goes_on_from_where_it_was(redis_url: str, tmp_path: Path) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": TOKENS, "n": CHOICES, "logprobs": 20, "seed": 1}
    likely = [[-0.5, [[65 + i, -0.5 - i] for i in range(20)]]] * TOKENS  # of a size, however tokens are put together
    script = {"steps": [[65 + i % 26] for i in range(TOKENS)], "logprobs": likely, "finish": "length", "step_ms": 5}
    with Deployment(redis_url, tmp_path, [script]) as deployment:
        deployment.start("worker")
        deployment.start("detok")
        deployment.start("api", "--slow-reader-s", "2")
        deployment.ready()
        with httpx.Client(base_url=deployment.url, timeout=120, trust_env=False) as http:
            expected = [choice["text"] for choice in http.post("/v1/completions", json=body).json()["choices"]]
            client = refuses_to_read(deployment.url, body | {"stream": True})
            wait_until(lambda: slow_readers(http, "paused") > 0, "nothing is held back for it")
            wait_until(lambda: slow_readers(http, "closed") > 0, "it is served for ever")
            first = drain(client).partition(b"\r\n\r\n")[2]
            client.close()
            events = [b"".join(part.split(b"\r\n")) for part in first.split(b"\n\n")]
            seen = [event[event.find(b"id: ") :].decode() for event in events[:-1] if b"id: " in event]
            whole = [event for event in seen if complete(event)]
            last = whole[-1].split("\n")[0].removeprefix("id: ")
            rest = http.get(f"/v1/streams/{last.partition(':')[0]}", headers={"Last-Event-ID": last})
            assert texts_of([*whole, *rest.text.split("\n\n")]) == expected
            assert "an answer broke off" not in deployment.logs()
            assert not re.search(r"ERROR +api", deployment.logs()), deployment.logs()


def complete(event: str) -> bool:
    """Whether nothing of it was cut off: chunks of the transfer end anywhere."""
    try:
        json.loads(event.partition("data: ")[2])
    except json.JSONDecodeError:
        return False
    return True
