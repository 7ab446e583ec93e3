"""Clients of a soak over HTTP: those that wait for a whole answer, stream it, leave in the middle, or abort it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
from headrace.deploy.bench.client import Client

SHORT, LONG = 4, 100  # tokens of an answer
LONG_RATE = 50  # tokens a second: a client that leaves does so long before the end
LONG_WORD = "long"
SCRIPT = ({"when": LONG_WORD, "tokens": LONG, "tokens_per_s": LONG_RATE}, {"tokens": SHORT, "finish": "length"})
ABORTED = "request_cancelled"  # what the client of an aborted stream is told, last
LIMIT_S = 60.0  # of one request
SHARES = {"whole": 9, "stream": 5, "leave stream": 3, "leave whole": 1, "abort": 2}  # of 20 clients


def body(word: str, number: int, *, stream: bool, **more: Any) -> bytes:
    """A completion's body; no two prompts are the same."""
    prompt = f"{word} {number}: the wheel turns the stone"
    return orjson.dumps({"model": "m", "prompt": prompt, "max_tokens": 4 * LONG, "stream": stream, **more})


@dataclass(slots=True)
class Event:
    """One event of a stream, and when it came (on the loop's clock)."""

    id: str
    data: dict[str, Any]
    at: float


@dataclass
class Stream:
    """An open stream over a connection of its own. Iterate it to its `[DONE]`."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    event_id: str = field(default="")

    @property
    def request(self) -> str:
        """The server's name for it, once an event has come."""
        return self.event_id.partition(":")[0]

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Raises EOFError where the connection ends before the stream does."""
        now = asyncio.get_running_loop().time
        while line := await self.reader.readline():
            if line.startswith(b"id: "):
                self.event_id = line[4:].decode().strip()
            elif line.startswith(b"data: [DONE]"):
                return
            elif line.startswith(b"data: "):
                yield Event(self.event_id, orjson.loads(line[6:]), now())
        raise EOFError("the stream was cut")


@asynccontextmanager
async def opened(url: str, sent: bytes, **headers: str) -> AsyncIterator[Stream]:
    """A streamed completion of this body; leaving the block closes its connection.

    Raises:
        ValueError: it was refused.
    """
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    lines = {"host": place.netloc, "content-type": "application/json", "content-length": str(len(sent)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    try:
        writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + sent)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"refused: {status.decode().strip()}")
        yield Stream(reader, writer)
    finally:
        writer.close()


class Clients:
    """Makes requests of all kinds at random.

    Attributes:
        tally: how many of each kind have ended as they should; and whatever else happened, by name.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self._url, self._random = url, random.Random(seed)
        self._http = Client(url, timeout_s=LIMIT_S)
        self._kinds = {
            "whole": self._whole,
            "stream": self._stream,
            "leave stream": self._leave_stream,
            "leave whole": self._leave_whole,
            "abort": self._abort,
        }

    async def run(self, count: int, concurrency: int) -> None:
        """So many requests, so many at a time."""
        numbers = iter(range(count))

        async def ask() -> None:
            for number in numbers:
                await self._one(number)

        async with asyncio.TaskGroup() as users:
            for _ in range(concurrency):
                users.create_task(ask())
        await self._http.close()

    @property
    def problems(self) -> dict[str, int]:
        """What should not have happened."""
        return {name: count for name, count in self.tally.items() if name not in SHARES}

    async def _one(self, number: int) -> None:
        (kind,) = self._random.choices(list(SHARES), SHARES.values())
        try:
            async with asyncio.timeout(LIMIT_S):
                problem = await self._kinds[kind](number)
        except (OSError, EOFError, TimeoutError, ValueError) as e:
            problem = f"{type(e).__name__}: {e}"
        self.tally[f"{kind}: {problem}" if problem else kind] += 1

    async def _whole(self, number: int) -> str | None:
        request = self._http.post("/v1/completions", body("short", number, stream=False))
        sample = await self._http.send(request, asyncio.get_running_loop().time())
        return sample.error or (None if sample.completion_tokens == SHORT else f"{sample.completion_tokens} tokens")

    async def _stream(self, number: int) -> str | None:
        sent = body("short", number, stream=True, stream_options={"include_usage": True})
        async with opened(self._url, sent) as stream:
            return _judged([event async for event in stream], "length", SHORT)

    async def _leave_stream(self, number: int) -> None:
        """Goes away after some events, or before the first; with the usual grace, or none."""
        headers = self._random.choice([{}, {"x-resume-grace": "0"}])
        async with opened(self._url, body(LONG_WORD, number, stream=True), **headers) as stream:
            stay = self._random.randrange(20)
            if stay:
                async for _ in stream:
                    stay -= 1
                    if not stay:
                        break

    async def _leave_whole(self, number: int) -> None:
        """Closes its connection while it waits for an answer, or before its body has been read."""
        place, sent = urlsplit(self._url), body(LONG_WORD, number, stream=False)
        _, writer = await asyncio.open_connection(place.hostname, place.port)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ncontent-length: {len(sent)}"
        )
        writer.write(f"{head}\r\n\r\n".encode() + sent)
        await asyncio.sleep(self._random.choice([0.0, self._random.uniform(0, 0.5)]))
        writer.close()

    async def _abort(self, number: int) -> str | None:
        """Ends its own stream by POST /abort_request at some time, and reads it to its end.

        A machine that is late may have made all of it by then: such a stream ends as if it had not been aborted.
        """
        sent = body(LONG_WORD, number, stream=True, stream_options={"include_usage": True})
        events, stay = list[Event](), self._random.randrange(1, 20)
        async with opened(self._url, sent) as stream:
            async for event in stream:
                events.append(event)
                if len(events) == stay:
                    asked = orjson.dumps({"rid": events[0].data["id"]})
                    answer = await self._http.send(self._http.post("/abort_request", asked), event.at)
                    if answer.error:
                        return f"not aborted: {answer.error}"
        if [event for event in events if "error" in event.data] != events[-1:]:
            return _judged(events, "length", LONG)
        code = str(events[-1].data["error"]["code"])
        return None if code == ABORTED and not _ends(events) else code


def _judged(events: list[Event], finish: str, tokens: int) -> str | None:
    """What is wrong with a stream that was read to its end: it ends once, as it should, after so many tokens."""
    if errors := [event.data["error"] for event in events if "error" in event.data]:
        return str(errors[0].get("code") or errors[0].get("message"))
    if _ends(events) != [finish]:
        return f"ended with {_ends(events)}"
    made = (events[-1].data.get("usage") or {}).get("completion_tokens")
    return f"{made} tokens" if made != tokens else None


def _ends(events: list[Event]) -> list[str]:
    return [c["finish_reason"] for e in events for c in e.data.get("choices", ()) if c["finish_reason"]]
