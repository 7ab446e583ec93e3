"""How soon streams move again when a detokenizer is killed: `python bench/soak.py --model DIR takeover`.

Two detokenizers share the shards of `--streams` open streams. Each stream comes quickly to `--tokens` tokens, and goes
on with two a second, of a text in which characters of several tokens and beginnings of a stop string are always about
to be held back. Then one detokenizer gets SIGKILL; `serve` starts another in its place. When both work again, the one
that has not been killed is next.

Prints a line of JSON for each kill: how many streams the dead one decoded, and seconds from the signal until the first,
the median and the last of them had new text published, and at their clients; the same of the other's streams, which
should hardly notice. In the end all are aborted, and the text of each must be the script's until there. The target: all
within 2 leases of a shard (6 s).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from headrace.deploy.bench.client import Client as HttpClient
from headrace.shared import keys
from headrace.shared.clients import Client, connect
from headrace.shared.ids import shard_in
from headrace.shared.registry import ProcessInfo, processes
from serving import Serving, serving
from soak_clients import ABORTED, body, opened
from tokenizers import Tokenizer

TEXT = (
    " Grüße, 世界 the wheel turns the stone that grinds the grain <|"  # with SmolLM2: two tokens at most are held back
)
STOP = " <|>"
AT_ONCE = 50  # tokens of a step until a stream has as many as it should
STEP_MS = 500
TARGET_S = 6.0
TAIL_TOKENS = 1500  # that a stream has left once it has as many as it should
LIMIT_S = 60.0  # for all streams to move again
FILLED_S = 600.0
LOOK_S = 0.1
OPENED_AT_ONCE = 32


class Watched:
    """One stream, read to its end, which is an error that says that it was aborted.

    Attributes:
        mark: byte offset that its text had when a detokenizer was killed.
        moved_at: when its client had text behind that; None: not yet.
    """

    def __init__(self) -> None:
        self.rid = self.error = ""
        self.parts: list[str] = []
        self.end = 0
        self.mark: float = float("inf")
        self.moved_at: float | None = None

    async def read(self, url: str, sent: bytes, opening: asyncio.Semaphore) -> None:
        async with AsyncExitStack() as stack:
            async with opening:
                stream = await stack.enter_async_context(opened(url, sent))
            async for event in stream:
                self.rid = self.rid or f"{stream.request}.0"
                for choice in event.data.get("choices", ()):
                    self.parts.append(choice["text"])
                    self.end += len(choice["text"].encode())
                if "error" in event.data:
                    self.error = str(event.data["error"]["code"])
                    return
                if self.moved_at is None and self.end > self.mark:
                    self.moved_at = time.monotonic()


def measure(args: argparse.Namespace, flags: Sequence[str]) -> bool:
    """Run it; whether all was in time, and every text right."""
    count = args.tokens + TAIL_TOKENS
    tokenizer = Tokenizer.from_file(str(Path(args.model) / "tokenizer.json"))
    ids = tokenizer.encode(TEXT * count, add_special_tokens=False).ids[:count]
    steps = [ids[at : min(at + AT_ONCE, args.tokens)] for at in range(0, args.tokens, AT_ONCE)]
    steps += [[token] for token in ids[args.tokens :]]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write(json.dumps({"steps": steps, "step_ms": STEP_MS}))
        file.flush()
        served = ["--model", f"m={args.model}", "--scripted", file.name, "--max-running", "100000", "--detoks", "2"]
        with serving([*served, *flags]) as server, connect(server.redis_url) as store:
            run = Takeovers(server, store, args.streams, args.tokens)
            return uvloop.run(run.all(args.kills, count, tokenizer.decode(ids, skip_special_tokens=False)))


class Takeovers:
    """The streams of one deployment, and its two detokenizers."""

    def __init__(self, server: Serving, store: Client, streams: int, tokens: int) -> None:
        self._server, self._store, self._tokens = server, store, tokens
        self._streams = [Watched() for _ in range(streams)]

    async def all(self, kills: int, count: int, text: str) -> bool:
        """Open every stream, kill detokenizers, read every stream to its end."""
        await _until(lambda: len(self._sharing()) == 2, LIMIT_S, "two detokenizers share the shards")
        sent = [body("go", n, stream=True, stop=STOP, max_tokens=count + 1) for n in range(len(self._streams))]
        opening, url = asyncio.Semaphore(OPENED_AT_ONCE), self._server.url
        reads = [asyncio.create_task(s.read(url, b, opening)) for s, b in zip(self._streams, sent, strict=True)]
        try:
            in_time = await self._kills(kills, reads)
            await self._abort_all()
            await asyncio.gather(*reads)
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        wrong = sum(s.error != ABORTED or not text.startswith("".join(s.parts)) for s in self._streams)
        print(json.dumps({"wrong_texts": wrong, "in_time": in_time}), flush=True)
        return in_time and not wrong

    async def _kills(self, kills: int, reads: Sequence[asyncio.Task[None]]) -> bool:
        """Kill one detokenizer after the other, once all streams have their tokens; whether all was in time."""
        await _until(self._filled, FILLED_S, "every stream has its tokens", reads)
        print(json.dumps({"streams": len(reads), "redis_mb": self._redis_mb()}), flush=True)
        in_time, survivor = True, 0
        for kill in range(1, kills + 1):
            await self._caught_up(reads)
            victim = next(p for p in self._sharing() if survivor in (0, p.pid))
            survivor = next(p.pid for p in self._sharing() if p.pid != victim.pid)
            line = await self._kill(victim, reads)
            in_time &= line["published_s"].get("last", LIMIT_S) <= TARGET_S and not line["stand_still"]
            print(json.dumps({"kill": kill, **line}), flush=True)
            await _until(lambda: len(self._sharing()) == 2, LIMIT_S, "two detokenizers share the shards", reads)
        return in_time

    async def _caught_up(self, reads: Sequence[asyncio.Task[None]]) -> None:
        """Every client has what is published now: what is measured is not how far the api was behind before."""
        began = time.monotonic()
        offsets = [self._place(row)[1] for row in self._rows(self._streams)]
        pairs = list(zip(self._streams, offsets, strict=True))
        await _until(lambda: all(s.end >= o for s, o in pairs), FILLED_S, "clients have what is published", reads)
        print(json.dumps({"clients_caught_up_s": round(time.monotonic() - began, 2)}), flush=True)

    async def _kill(self, victim: ProcessInfo, reads: Sequence[asyncio.Task[None]]) -> dict[str, Any]:
        shards = set(victim.extra["shards"])
        its, others = ([s for s in self._streams if (shard_in(s.rid) in shards) is mine] for mine in (True, False))
        os.kill(victim.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        places = {s: self._place(row) for s, row in zip(self._streams, self._rows(self._streams), strict=True)}
        for stream, (_, offset) in places.items():
            stream.mark, stream.moved_at = offset, None
        published: dict[Watched, float] = {}
        waiting = its

        def all_moved() -> bool:
            nonlocal waiting
            rows = dict(zip(waiting, map(self._place, self._rows(waiting)), strict=True))
            published.update({s: time.monotonic() - killed_at for s in waiting if rows[s][1] > places[s][1]})
            waiting = [s for s in waiting if s not in published]
            return not waiting and all(s.moved_at is not None for s in its + others)

        await _until(all_moved, LIMIT_S, "", reads)
        return {
            "streams": len(its),
            "published_s": _spread(list(published.values())),
            "at_client_s": _spread([s.moved_at - killed_at for s in its if s.moved_at is not None]),
            "others_at_client_s": _spread([s.moved_at - killed_at for s in others if s.moved_at is not None]),
            "stand_still": sum(s.moved_at is None for s in its + others),
        }

    async def _abort_all(self) -> None:
        http = HttpClient(self._server.url, timeout_s=LIMIT_S)
        answer = await http.send(http.post("/abort_request", b'{"abort_all": true}'), time.monotonic())
        await http.close()
        if answer.error:
            raise SystemExit(f"the streams could not be aborted: {answer.error}")

    def _sharing(self) -> list[ProcessInfo]:
        """The detokenizers that lease an equal share, once all shards are leased."""
        found = [p for p in processes(self._store) if p.role == "detok" and p.extra.get("shards")]
        half = keys.DEFAULT_SHARDS // 2
        live = [p for p in found if len(p.extra["shards"]) == half and p.pid in self._server.pids("detok")]
        return live if len({shard for p in live for shard in p.extra["shards"]}) == 2 * half else []

    def _filled(self) -> bool:
        named = [s for s in self._streams if s.rid]
        if len(named) < len(self._streams):
            return False
        return all(self._place(row)[0] >= self._tokens for row in self._rows(named))

    def _rows(self, streams: Sequence[Watched]) -> list[Any]:
        """Tokens and bytes that are published of each."""
        pipe = self._store.pipeline(transaction=False)
        for stream in streams:
            pipe.hmget(keys.request(shard_in(stream.rid), stream.rid), "c", "o")
        return list(pipe.execute())

    @staticmethod
    def _place(row: Any) -> tuple[int, int]:
        return int(row[0] or 0), int(row[1] or 0)

    def _redis_mb(self) -> float:
        return round(self._store.info("memory")["used_memory"] / 2**20, 1)


async def _until(what: Callable[[], bool], limit_s: float, name: str, tasks: Sequence[asyncio.Task[None]] = ()) -> None:
    """Wait for something. A task that fails ends it.

    Raises:
        SystemExit: it has not come in time, and has a name.
    """
    until = time.monotonic() + limit_s
    while not what():
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() > until:
            if name:
                raise SystemExit(f"after {limit_s:g} s it is still not true that {name}")
            return
        await asyncio.sleep(LOOK_S)


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    spread = {"first": min(values), "median": statistics.median(values), "last": max(values)}
    return {name: round(value, 2) for name, value in spread.items()}


if __name__ == "__main__":
    raise SystemExit("python bench/soak.py --model DIR takeover")
