"""When requests are sent: users who wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from .samples import Sample

Send = Callable[[bytes, float], Awaitable[Sample]]


async def closed_loop(send: Send, requests: Sequence[bytes], concurrency: int) -> list[Sample]:
    """`concurrency` users take the requests in turn, each sending its next one when its last is answered."""
    queue = iter(requests)
    samples: list[Sample] = []

    async def user() -> None:
        for request in queue:
            samples.append(await send(request, time.perf_counter()))

    async with asyncio.TaskGroup() as users:
        for _ in range(min(concurrency, len(requests))):
            users.create_task(user())
    return samples


async def open_loop(send: Send, requests: Sequence[bytes], arrivals: Sequence[float]) -> list[Sample]:
    """Send each request at its arrival (seconds from now), however many are still unanswered."""
    begin = time.perf_counter()
    samples: list[Sample] = []

    async def visit(request: bytes, due: float) -> None:
        samples.append(await send(request, due))

    async with asyncio.TaskGroup() as visits:
        for request, arrival in zip(requests, arrivals, strict=True):
            if (wait := begin + arrival - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            visits.create_task(visit(request, begin + arrival))
    return samples


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrival times in seconds, ascending, with exponential gaps of mean 1 / `rate`."""
    rng = random.Random(f"{seed}:arrivals:{rate}")
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))
