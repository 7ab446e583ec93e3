"""Requests put into the queue as the api puts them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.clients import connect_async
from headrace.shared.ids import new_family
from headrace.shared.messages import GenerateJob, SamplingParams

SHARDS = 4


def a_job() -> GenerateJob:
    """Twenty prompt tokens for the pool `m`."""
    sampling = SamplingParams(max_new_tokens=8, sampling_seed=7)
    return GenerateJob(new_family(SHARDS), "m", "m", "sha", tuple(range(20)), sampling)


def submit(
    url: str, n: int = 1, reader_lease_s: float | None = None, deadline_s: float = 60, **job: object
) -> list[str]:
    """Submit `a_job` with the fields that are given; returns the rids of its choices."""

    async def go() -> list[str]:
        client = connect_async(url)
        try:
            queue = AsyncJobQueue(client, SHARDS, max_waiting=128)
            made = replace(a_job(), **job)  # type: ignore[arg-type]
            return list(await queue.submit(made, n=n, deadline_s=deadline_s, reader_lease_s=reader_lease_s, keep_s=30))
        finally:
            await client.aclose()

    return asyncio.run(go())
