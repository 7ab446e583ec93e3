"""How the queue stands as a whole: what waits, runs, was lost or given up. For metrics and `headrace top`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .clients import AsyncClient, Client
from .messages import LANES, Lane
from .scripts import AsyncScripts, Call, Scripts

# What the scripts count (`hr:{s}:count`), and what each means.
COUNTERS = {
    "submitted": "Choices accepted",
    "done": "Choices that reached their end",
    "refused": "Requests refused because a queue was full",
    "retries": "Requests given to the queue again because their worker's lease ran out",
    "takeovers": "Claims of a request that had been claimed before",
    "fenced": "Writes refused because another process holds the request or shard now",
    "expired": "Choices that passed their deadline",
    "unread": "Choices that ended because nobody read them any more",
    "dead": "Requests given up because they ended their worker again and again",
}


@dataclass(frozen=True, slots=True)
class LaneState:
    """One lane of a pool."""

    waiting: int = 0
    running: int = 0  # at a worker
    oldest_s: float | None = None  # since the oldest that waits was accepted; None: none waits, or it is not known
    taken_per_s: float = 0.0  # lately

    def __add__(self, other: LaneState) -> LaneState:
        ages = [age for age in (self.oldest_s, other.oldest_s) if age is not None]
        return LaneState(
            self.waiting + other.waiting,
            self.running + other.running,
            max(ages, default=None),
            self.taken_per_s + other.taken_per_s,
        )


@dataclass(frozen=True, slots=True)
class Overview:
    """All shards together."""

    counters: Mapping[str, int]  # of COUNTERS, since the store was first used
    lanes: Mapping[tuple[str, Lane], LaneState]  # by pool and lane
    unfinished: int  # choices that have not reached their end
    overdue_s: float  # how long ago the request that must be looked at first was due: a sweep comes each second
    dead_letters: int  # kept for a look (`hr:{s}:dead`)
    text_bytes: int  # of finished requests, kept for their readers
    shards_leased: int
    shards_free: int
    shard_free_s: float  # how long the shard has had no detokenizer that has had none for longest


def merge(pools: Sequence[str], replies: Iterable[Sequence[Any]]) -> Overview:
    """The replies of overview.lua, one per shard, as one picture."""
    counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
    lanes: dict[tuple[str, Lane], LaneState] = {(pool, lane): LaneState() for pool in pools for lane in LANES}
    unfinished = dead = text_bytes = leased = free = 0
    overdue_ms = free_ms = 0.0
    for flat, active, overdue, letters, finished, lease_over, owner, *by_pool in replies:
        for name, value in zip(flat[::2], flat[1::2], strict=True):
            counters[name.decode()] += int(value)
        unfinished, dead, text_bytes = unfinished + active, dead + letters, text_bytes + finished
        held = bool(owner) and lease_over == b""
        leased, free = leased + held, free + (not held)
        overdue_ms, free_ms = max(overdue_ms, float(overdue)), max(free_ms, float(lease_over or 0))
        for pool, rows in zip(pools, by_pool, strict=True):
            for lane, row in zip(LANES, rows, strict=True):
                lanes[pool, lane] += _lane(*row)
    return Overview(counters, lanes, unfinished, overdue_ms / 1000, dead, text_bytes, leased, free, free_ms / 1000)


def _lane(waiting: int, running: int, oldest_ms: bytes | int, taken: bytes) -> LaneState:
    return LaneState(waiting, running, None if oldest_ms == b"" else int(oldest_ms) / 1000, float(taken))


def _calls(shards: int, pools: Sequence[str]) -> list[Call]:
    return [Call("overview", shard, tuple(pools)) for shard in range(shards)]


def read(client: Client, shards: int, pools: Sequence[str]) -> Overview:
    """Raises StoreUnavailable after 5 s without Redis."""
    return merge(pools, Scripts(client, limit_s=5.0).call_many(_calls(shards, pools)))


async def read_async(client: AsyncClient, shards: int, pools: Sequence[str]) -> Overview:
    """The asynchronous twin of `read`."""
    return merge(pools, await AsyncScripts(client).call_many(_calls(shards, pools)))
