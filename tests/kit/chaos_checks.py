"""What must be true of the store after a chaotic run, once no request is left."""

from __future__ import annotations

import re

import redis.exceptions
from headrace.shared import keys
from headrace.shared.clients import Client
from headrace.shared.messages import LANES
from headrace.shared.registry import processes


def left_over(store: Client) -> list[str]:
    """What holds a request, a slot or a job though no request is there."""
    left = []
    for shard in range(keys.DEFAULT_SHARDS):
        for lane in LANES:
            stream = keys.jobs(shard, "m", lane)
            if store.xlen(stream):
                left.append(f"{stream}: {store.xlen(stream)} jobs")
            if store.exists(stream) and (pending := _pending(store, stream)):
                left.append(f"{stream}: {pending} entries are not acknowledged")
        depth = {k.decode(): v for k, v in store.hgetall(keys.depth(shard, "m")).items()}
        left += [f"depth of {lane} in {shard}: {depth[lane]!r}" for lane in LANES if int(depth.get(lane, 0))]
        for kind in ("b", "t", "tq", "sq"):
            left += [key.decode() for key in store.scan_iter(f"hr:{{{shard}}}:{kind}:*", count=1000)]
    for process in processes(store):
        blocks = process.extra.get("stats", {}).get("kv_blocks_used", 0)
        if process.extra.get("running") or blocks:
            left.append(f"worker {process.pid} holds {process.extra['running']} requests, {blocks:g} blocks")
    return left


def _pending(store: Client, stream: str) -> int:
    try:
        return int(store.xpending(stream, keys.GROUP)["pending"])
    except redis.exceptions.ResponseError:  # the group went with a tail; nothing is handed over without one
        return 0


LASTING = re.compile(
    r"hr:(schema|models|blob:.*|workers|batch.*|file.*|upload.*|pool:.*|ctl:.*)"
    r"|hr:\{\d+\}:(lease|count|act|fin|finb|dead|new:.*|depth:.*|tv:.*|jobs:.*|rate:.*|ov.*)|rq:.*"
)


def without_lifetime(store: Client) -> list[str]:
    """Keys of requests that nothing would ever remove."""
    return [
        key.decode()
        for key in store.scan_iter("*", count=1000)
        if not LASTING.fullmatch(key.decode()) and store.pttl(key) == -1
    ]


def wrong_sums(store: Client) -> list[str]:
    """Counters that do not say what they count; a choice that was accepted and has not ended just once."""
    wrong = []
    for shard in range(keys.DEFAULT_SHARDS):
        prefix = keys.prefix(shard)
        accepted, ended = (int(store.hget(keys.counters(shard), what) or 0) for what in ("submitted", "done"))
        if accepted != ended:
            wrong.append(f"{prefix}count says {accepted} choices accepted, {ended} ended")
        members = [member.decode().split() for member in store.zrange(f"{prefix}fin", 0, -1)]
        total = int(store.get(f"{prefix}finb") or 0)
        if total != sum(int(size) for _, size in members):
            wrong.append(f"{prefix}finb says {total}, its members {sum(int(size) for _, size in members)}")
    return wrong
