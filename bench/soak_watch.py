"""What a soak looks at while it runs, and says in the end: memory, keys, consumers, sums, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import redis.exceptions
from headrace.shared import keys
from headrace.shared.clients import Client
from headrace.shared.messages import LANES
from headrace.shared.overview import read
from headrace.shared.registry import processes
from serving import Serving

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from kit.chaos_checks import left_over, without_lifetime, wrong_sums

COUNTED = ("keys", "consumers", "processes")
FLAT = 1.1  # of what the second quarter had
POOL = "m"
SETTLES_S = 60  # deadlines, graces and sweeps that the last requests still need


class Watch:
    """Looks at a deployment every so often, and prints a line of JSON each time.

    Args:
        progress: what the load has to say at such a time, by name.
    """

    def __init__(
        self, server: Serving, store: Client, every_s: float, progress: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._server, self._store, self._every_s, self._progress = server, store, every_s, progress
        self._began = time.monotonic()
        self.rows: list[dict[str, Any]] = []

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[Watch]:
        """Look for the time of the block."""
        task = asyncio.create_task(self._look_again())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _look_again(self) -> None:
        due = time.monotonic()
        while True:
            self.look()
            due += self._every_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def look(self) -> None:
        """One row."""
        memory = self._store.info("memory")
        row = {
            "at_s": round(time.monotonic() - self._began, 1),
            "rss_mb": {name: round(kb / 1024, 1) for name, kb in self._rss_kb()},
            "redis_used_mb": round(memory["used_memory"] / 2**20, 2),
            "keys": self._store.dbsize(),
            "consumers": self._consumers(),
            "processes": len(processes(self._store)),
            **self._progress(),
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def _rss_kb(self) -> Iterator[tuple[str, int]]:
        for role in ("serve", "api", "worker", "detok", "redis"):
            for n, pid in enumerate(self._server.pids(role)):
                with contextlib.suppress(OSError, StopIteration):  # a process that has just ended
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    yield f"{role}.{n}", int(next(line for line in lines if line.startswith("VmRSS")).split()[1])

    def _consumers(self) -> int:
        """Named consumers of all job streams."""
        count = 0
        for shard in range(keys.DEFAULT_SHARDS):
            for lane in LANES:
                with contextlib.suppress(redis.exceptions.ResponseError):  # no stream yet
                    count += len(self._store.xinfo_consumers(keys.jobs(shard, POOL, lane), keys.GROUP))
        return count

    def verdict(self, requests: int) -> dict[str, Any]:
        """Whether everything is flat: means of the second quarter and of the last one.

        Args:
            requests: that were made in all.
        """
        series = {name: [row["rss_mb"].get(name) for row in self.rows] for name in self.rows[-1]["rss_mb"]}
        series |= {name: [row[name] for row in self.rows] for name in ("redis_used_mb", *COUNTED)}
        return {name: _compare(values, requests, in_mb=name not in COUNTED) for name, values in series.items()}


def _compare(values: list[float | None], requests: int, *, in_mb: bool) -> dict[str, Any]:
    quarter = len(values) // 4
    if not quarter or None in values:
        return {"flat": None, "why": "too few looks" if not quarter else "the process was not there all the time"}
    numbers = [value for value in values if value is not None]
    second, last = statistics.mean(numbers[quarter : 2 * quarter]), statistics.mean(numbers[-quarter:])
    ratio = last / second if second else 1.0
    row = {
        "second_quarter": round(second, 2),
        "last_quarter": round(last, 2),
        "ratio": round(ratio, 3),
        "flat": ratio <= FLAT,
    }
    if in_mb:  # the quarters' middles are half of the run apart, and half of the requests
        row["grown_bytes_per_request"] = round((last - second) * 2**20 / max(1, requests * 5 / 8))
    return row


async def settled(store: Client) -> dict[str, Any]:
    """What is left once every request has had the time to end: nothing should be."""
    for _ in range(SETTLES_S):
        if not (unfinished := _overview(store).unfinished):
            break
        await asyncio.sleep(1)
    await asyncio.sleep(5)  # a worker says what it holds with its next heartbeat
    problems = [*left_over(store), *(f"no lifetime: {key}" for key in without_lifetime(store)), *wrong_sums(store)]
    if unfinished:
        problems.append(f"{unfinished} requests have not ended after {SETTLES_S} s")
    return {"counters": dict(_overview(store).counters), "problems": problems[:20], "of_problems": len(problems)}


def _overview(store: Client) -> Any:
    return read(store, keys.DEFAULT_SHARDS, [POOL])


def percentiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest, in ms, of seconds."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {"p50": len(ordered) // 2, "p99": min(len(ordered) - 1, len(ordered) * 99 // 100), "max": len(ordered) - 1}
    return {name: round(1000 * ordered[place], 1) for name, place in at.items()}
