"""Short requests at a fixed rate: over HTTP, or submitted and followed as the api does it."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any, Self

from headrace.deploy.bench.client import Client
from headrace.shared import keys
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.clients import connect, connect_async
from headrace.shared.errors import HeadraceError
from headrace.shared.ids import new_family
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.model_card import ModelCard
from headrace.shared.text_feed import TextFeed
from serving import Serving
from soak_clients import LIMIT_S, SHORT, body
from soak_watch import percentiles

MOST_OPEN = 4000  # requests that wait for their answers at once: more come where the rate is too high for the machine
READER = "soak"
READER_LEASE_S = 20.0
PROMPT = tuple(range(300, 316))
MINUTE_S = 60.0


class Load:
    """An open loop.

    Attributes:
        sent: requests so far.
        tally: what became of them.
        behind: requests that were not sent, because too many were open.
    """

    def __init__(self, server: Serving) -> None:
        self.server = server
        self.sent = self.behind = 0
        self.tally: Counter[str] = Counter()
        self.minutes: list[dict[str, Any]] = []
        self._latencies: list[float] = []
        self._open: set[asyncio.Task[None]] = set()
        self._began = self._minute_began = 0.0
        self._cpu_s: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is held."""

    def one(self, number: int) -> Awaitable[str | None]:
        """One request to its end; what is wrong with it, if anything."""
        raise NotImplementedError

    async def run(self, rate: float, seconds: float, seed: int) -> None:
        """Arrivals at random (exponential gaps), for so long; then the last answers."""
        gaps, cpu_before = random.Random(seed), self._all_cpu_s()
        self._began = self._minute_began = due = time.monotonic()
        while (due := due + gaps.expovariate(rate)) < self._began + seconds:
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            if due - self._minute_began >= MINUTE_S:
                self._close_minute(MINUTE_S)
            if len(self._open) >= MOST_OPEN:
                self.behind += 1
                await asyncio.sleep(0)
                continue
            task = asyncio.create_task(self._visit(self.sent, due))
            self.sent += 1
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        while self._open:
            await asyncio.wait(set(self._open))
        self._close_minute(time.monotonic() - self._minute_began)
        self._cpu_s = {role: used - cpu_before.get(role, 0.0) for role, used in self._all_cpu_s().items()}

    def _all_cpu_s(self) -> dict[str, float]:
        return {**self.server.cpu_s(), "client": time.process_time()}

    async def _visit(self, number: int, due: float) -> None:
        try:
            async with asyncio.timeout(LIMIT_S):
                problem = await self.one(number)
        except (OSError, TimeoutError, HeadraceError) as e:
            problem = f"{type(e).__name__}: {e}"
        self.tally[problem or "well"] += 1
        self._latencies.append(time.monotonic() - due)

    def _close_minute(self, lasted_s: float) -> None:
        self._minute_began += lasted_s
        ended = len(self._latencies)
        self.minutes.append({"per_s": round(ended / lasted_s, 1), **percentiles(self._latencies)})
        self._latencies = []

    def progress(self) -> dict[str, Any]:
        """What is said at each look."""
        return {
            "ended": self.tally.total(),
            "open": len(self._open),
            "minute": self.minutes[-1] if self.minutes else {},
        }

    def summary(self) -> dict[str, Any]:
        """What is said in the end; latencies in ms from the moment at which a request was due."""
        lasted_s = self._minute_began - self._began
        achieved = round(self.tally["well"] / lasted_s, 1)
        cpu = {role: round(1e6 * used / max(1, self.sent)) for role, used in self._cpu_s.items()}
        rates = {"through": type(self).__name__, "achieved_per_s": achieved, "not_sent": self.behind}
        return {**rates, "cpu_us_per_request": cpu, "tally": dict(self.tally.most_common(20)), "minutes": self.minutes}

    @property
    def well(self) -> bool:
        return not self.behind and self.tally.keys() == {"well"}


class HttpLoad(Load):
    """Through an api process."""

    async def __aenter__(self) -> Self:
        self._http = Client(self.server.url, timeout_s=LIMIT_S)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def one(self, number: int) -> str | None:
        sample = await self._http.send(self._http.post("/v1/completions", body("short", number, stream=False)), 0.0)
        return sample.error or (None if sample.completion_tokens == SHORT else f"{sample.completion_tokens} tokens")


class NativeLoad(Load):
    """Submitted and followed in this process, as an api replica does it for an answer that is not streamed."""

    async def __aenter__(self) -> Self:
        with connect(self.server.redis_url) as store:
            self._tokenizer = ModelCard.decode(store.hget(keys.MODELS, "m")).tokenizer
        self._client = connect_async(self.server.redis_url)
        self._queue = AsyncJobQueue(self._client, keys.DEFAULT_SHARDS)
        self._feed = TextFeed(self._client, keys.DEFAULT_SHARDS, READER)
        await self._feed.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._feed.__aexit__()
        await self._client.aclose()

    async def one(self, number: int) -> str | None:
        sampling = SamplingParams(max_new_tokens=4 * SHORT, sampling_seed=number)
        job = GenerateJob(new_family(keys.DEFAULT_SHARDS), "m", "m", self._tokenizer, PROMPT, sampling)
        rids = await self._queue.submit(
            job, deadline_s=LIMIT_S, reader_lease_s=READER_LEASE_S, keep_s=keys.KEEP_WHOLE_MS / 1000, reader=READER
        )
        last = None
        async with self._feed.follow(rids) as chunks:
            async for chunk in chunks:
                last = chunk
        if last is None or last.finish is None:
            return "no end"
        return None if last.usage.completion_tokens == SHORT else f"{last.usage.completion_tokens} tokens"
