"""Requests put into the queue as the api puts them, and one of each of the queue's clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from headrace.shared import keys
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import Finish, TextChunk, TokenChunk, Usage
from headrace.shared.clients import Client, connect, connect_async
from headrace.shared.ids import new_family, shard_in
from headrace.shared.job_queue import Claim, JobQueue
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.scripts import Scripts
from headrace.shared.text_stream import Publish, Published, ShardLease, TextStream
from headrace.shared.token_stream import TokenStream

SHARDS = 4
LEASE_S = 3.0


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


def chunk(rid: str, start: int, *ids: int, finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(rid, start, tuple(ids), finish=finish)


class Rig:
    """One Redis with one of each of the queue's clients."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Client = connect(url)
        self.scripts = Scripts(self.client, limit_s=5.0)
        self.queue = JobQueue(self.client, self.scripts, SHARDS)
        self.lease = ShardLease(self.scripts, "detok", LEASE_S)
        self.text = TextStream(self.client, self.scripts, "detok")

    def tokens(self, owner: str = "w1") -> TokenStream:
        return TokenStream(self.client, self.scripts, owner, LEASE_S)

    def submit(
        self, n: int = 1, reader_lease_s: float | None = None, deadline_s: float = 60, **job: object
    ) -> list[str]:
        return submit(self.url, n, reader_lease_s, deadline_s, **job)

    def pull(self, slots: int = 100, owner: str = "w1", lease_s: float = LEASE_S) -> list[Claim]:
        return self.queue.pull("m", owner=owner, consumer=f"host:{owner}", slots=slots, lease_s=lease_s)

    def sweep(self, reclaim: bool = True) -> None:
        for shard in range(SHARDS):
            while self.queue.sweep(shard, reclaim=reclaim, text_budget=1 << 20):
                pass

    def state(self, rid: str) -> dict[str, str]:
        raw = self.client.hgetall(keys.request(shard_in(rid), rid))
        return {k.decode(): v.decode("utf-8", "replace") for k, v in raw.items()}

    def expire_lease(self, rid: str) -> None:
        """As if the lease had run out."""
        self.client.hset(keys.request(shard_in(rid), rid), "lu", 1)
        self.client.zadd(keys.active(shard_in(rid)), {rid: 1})

    def publish_end(self, rid: str, tokens: int) -> Published:
        shard = shard_in(rid)
        epoch = self.lease.take([shard])[shard]
        chunk = TextChunk(rid, 0, "text", Usage(20, tokens), finish=Finish("stop"))
        return self.text.publish(shard, epoch, [Publish(chunk, 0, tokens, b"state")])[rid]
