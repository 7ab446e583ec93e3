"""Tokens per second of one detokenizer through Redis: `python bench/detok_redis.py tokenizer.json redis-url`.

A worker's flushes for `--requests` requests are appended, then read, decoded and published, in turn; only the latter is
timed, Redis' own work included. The database is left with the requests' texts, so use one of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import time
from pathlib import Path

from headrace.detok.streams import Streams
from headrace.detok.vocab import Vocabulary
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import TokenChunk
from headrace.shared.clients import connect, connect_async
from headrace.shared.ids import new_family, shard_in
from headrace.shared.job_queue import JobQueue
from headrace.shared.keys import DEFAULT_SHARDS
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.scripts import Scripts
from headrace.shared.text_stream import ShardLease, TextStream
from headrace.shared.token_stream import Append, TokenStream
from tokenizers import Tokenizer


async def submit(url: str, pool: str, count: int) -> list[str]:
    client = connect_async(url)
    queue = AsyncJobQueue(client, DEFAULT_SHARDS)
    rids: list[str] = []
    for _ in range(count):
        job = GenerateJob(new_family(DEFAULT_SHARDS), "m", pool, "t", (1,), SamplingParams(sampling_seed=1))
        rids += await queue.submit(job, deadline_s=3600, reader_lease_s=None, keep_s=30)
    await client.aclose()
    return rids


def measure(url: str, vocab: Vocabulary, ids: list[int], requests: int, size: int) -> tuple[float, float]:
    """Tokens per second of wall time, and of this process's CPU time."""
    client, pool = connect(url), f"pool{size}"
    scripts = Scripts(client)
    rids = asyncio.run(submit(url, pool, requests))
    queue, tokens = JobQueue(client, scripts, DEFAULT_SHARDS), TokenStream(client, scripts, "w", 3600)
    claims = queue.pull(pool, owner="w", consumer="bench:0", slots=requests, lease_s=3600)
    epochs = {claim.job.rid: claim.epoch for claim in claims}
    shards = sorted({shard_in(rid) for rid in rids})
    lease = ShardLease(scripts, "d", 3600).take(shards)
    if set(lease) != set(shards):
        raise SystemExit(f"{url} is in use: another detokenizer leases its shards")
    streams = Streams(tokens, TextStream(client, scripts, "d"), lambda sha256: vocab)
    for shard in shards:
        streams.begin(shard)
    wall = cpu = 0.0
    for at in range(0, len(ids), size):
        flush = tuple(ids[at : at + size])
        tokens.append([Append(epochs[rid], TokenChunk(rid, at, flush)) for rid in rids])
        start, cpu_start = time.perf_counter(), time.process_time()
        streams.publish(streams.decode(rids)[0], lease)
        streams.settle()
        wall += time.perf_counter() - start
        cpu += time.process_time() - cpu_start
    client.close()
    return requests * len(ids) / wall, requests * len(ids) / cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("redis_url")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    blob = args.tokenizer.read_bytes()
    vocab = Vocabulary.from_blob(blob)
    print(f"tokenizer {hashlib.sha256(blob).hexdigest()[:12]}, {args.requests} requests of {args.tokens} tokens")
    text = "The quick brown fox jumps over 13 lazy dogs — naïve, 世界; " * (args.tokens // 8 + 1)
    ids = Tokenizer.from_str(blob.decode()).encode(text).ids[: args.tokens]
    for size in (1, 8):
        wall, cpu = measure(args.redis_url, vocab, ids, args.requests, size)
        print(f"{size} a flush  {wall:>9,.0f} tokens/s  {cpu:>9,.0f} tokens/s of CPU")


if __name__ == "__main__":
    main()
