"""What Redis takes for a flush: `python bench/flushes.py [--requests 8 64 256] [--tokens 64] [--sizes 1 8]`.

A flush is one request's new tokens on their way through Redis: appended by its worker (all requests of a step in one
call per shard), published as text by its detokenizer, both pushed to who hears them, as in a deployment; nothing is
computed or decoded. On an embedded server of its own, with its append-only file. Prints a line of JSON a case: flushes
a second, µs of the server's CPU for one, and bytes that a request takes once it has begun and later, its body apart.
The target: at most 30 µs, and 6 KB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.deploy.data_folder import DataFolder
from headrace.deploy.embedded import EmbeddedServer
from headrace.shared import keys
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import TextChunk, TokenChunk, Usage
from headrace.shared.clients import connect, connect_async
from headrace.shared.ids import new_family, shard_in
from headrace.shared.job_queue import JobQueue
from headrace.shared.keys import DEFAULT_SHARDS
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.scripts import Scripts
from headrace.shared.text_stream import Publish, ShardLease, TextStream
from headrace.shared.token_stream import Append, TokenStream

PROMPT = 100  # tokens
STATE = b"x" * 60  # a detokenizer's state of an ordinary request
READER = "bench"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8], help="tokens of a flush")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        server = EmbeddedServer(DataFolder(Path(folder)), maxmemory=1 << 30)
        server.start()
        try:
            for size in args.sizes:
                for requests in args.requests:
                    print(json.dumps(measure(server.url, requests, args.tokens, size)), flush=True)
        finally:
            server.stop()


def measure(url: str, requests: int, tokens: int, size: int) -> dict[str, Any]:
    """One case, in an empty store."""
    with connect(url) as client, listening(url):
        client.flushall()
        rids = asyncio.run(submit(url, requests))
        flow = Flow(url, rids)
        flow.flush(0, size)
        begun = data_bytes(client)
        for at in range(size, tokens, size):
            flow.flush(at, size)
        alive = data_bytes(client)
        before, began = cpu_s(client), time.perf_counter()
        for at in range(tokens, 2 * tokens, size):
            flow.flush(at, size)
        wall, cpu = time.perf_counter() - began, cpu_s(client) - before
    flushes = requests * tokens / size
    return {
        "requests": requests,
        "tokens_a_flush": size,
        "flushes_per_s": round(flushes / wall),
        "redis_cpu_us_per_flush": round(1e6 * cpu / flushes, 1),
        "bytes_of_a_request_that_begins": round(begun / requests),
        f"bytes_of_one_with_{tokens}_tokens": round(alive / requests),
    }


async def submit(url: str, count: int) -> list[str]:
    client = connect_async(url)
    queue, sampling = AsyncJobQueue(client, DEFAULT_SHARDS), SamplingParams(max_new_tokens=512, sampling_seed=1)
    rids: list[str] = []
    for _ in range(count):
        job = GenerateJob(new_family(DEFAULT_SHARDS), "m", "m", "t", tuple(range(PROMPT)), sampling)
        rids += await queue.submit(job, deadline_s=3600, reader_lease_s=20, keep_s=600, reader=READER)
    await client.aclose()
    return rids


class Flow:
    """A worker and a detokenizer that think nothing."""

    def __init__(self, url: str, rids: list[str]) -> None:
        client = connect(url)
        scripts = [Scripts(client) for _ in range(3)]
        queue = JobQueue(client, scripts[0], DEFAULT_SHARDS)
        claims = queue.pull("m", owner="w", consumer="bench:0", slots=len(rids), lease_s=3600)
        self._epochs = {claim.job.rid: claim.epoch for claim in claims}
        self._tokens = TokenStream(client, scripts[1], "w", 3600)
        self._lease = ShardLease(scripts[0], "d", 3600).take(range(DEFAULT_SHARDS))
        self._text = TextStream(client, scripts[2], "d")

    def flush(self, at: int, size: int) -> None:
        """`size` tokens of every request, from its worker to its reader."""
        ids = tuple(range(1000, 1000 + size))
        self._tokens.append([Append(epoch, TokenChunk(rid, at, ids)) for rid, epoch in self._epochs.items()])
        text, writes = "word " * size, dict[int, list[Publish]]()
        for rid in self._epochs:
            chunk = TextChunk(rid, at * len("word "), text, Usage(PROMPT, at + size))
            writes.setdefault(shard_in(rid), []).append(Publish(chunk, at, at + size, STATE))
        self._text.begin_publish({shard: (self._lease[shard], group) for shard, group in writes.items()})
        self._text.finish_publish()


@contextlib.contextmanager
def listening(url: str) -> Iterator[None]:
    """Somebody hears what is pushed to the detokenizer and to the reader."""
    client = connect(url)
    pubsub = client.pubsub(ignore_subscribe_messages=True)
    for shard in range(DEFAULT_SHARDS):
        pubsub.subscribe(keys.wake(shard), keys.reader_channel(shard, READER))
    ended = threading.Event()

    def hear() -> None:
        while not ended.is_set():
            pubsub.get_message(timeout=0.1)

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        client.close()


def data_bytes(client: Any) -> int:
    """What all keys take but the requests' bodies: without scripts, connections and buffers, which are nobody's."""
    names = [key for key in client.scan_iter(count=1000) if b":b:" not in key]
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.memory_usage(name, samples=0)
    return sum(size or 0 for size in pipe.execute())


def cpu_s(client: Any) -> float:
    """CPU seconds of the server so far, all its threads."""
    used = client.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])


if __name__ == "__main__":
    main()
