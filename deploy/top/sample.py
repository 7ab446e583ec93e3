"""One look at a deployment, and what two of them say together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...shared import keys, overview
from ...shared.clients import Client
from ...shared.errors import ConfigError
from ...shared.model_card import ModelCard
from ...shared.overview import Overview
from ...shared.registry import ProcessInfo, processes

LOAD = {  # what each role tells of its load with its heartbeats
    "api": ("open_streams", "open_requests", "requests", "refused", "slow_readers"),
    "worker": (
        "running",
        "free_slots",
        "lease_age_s",
        "decode_tokens",
        "prefill_tokens",
        "kv_blocks_used",
        "kv_blocks",
    ),
    "detok": ("streams", "shards", "tokens", "chunks", "rereads"),
    "batch": ("driving", "slices"),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """A deployment as it was `at` (monotonic seconds)."""

    at: float
    processes: tuple[ProcessInfo, ...]
    queue: Overview


def look(client: Client) -> Sample:
    """Raises ConfigError: this Redis holds no deployment."""
    shards = client.hget(keys.SCHEMA, "shards")
    if shards is None:
        raise ConfigError("--redis-url (HEADRACE_REDIS_URL): there is no deployment on this Redis")
    cards = [ModelCard.decode(card) for card in client.hvals(keys.MODELS)]
    pools = sorted({card.pool for card in cards})
    return Sample(time.monotonic(), tuple(processes(client)), overview.read(client, int(shards), pools))


def load_of(process: ProcessInfo) -> dict[str, float]:
    """The numbers of a process that its role is known by."""
    told = {**process.extra, **process.extra.get("stats", {})}
    return {name: told[name] for name in LOAD[process.role] if isinstance(told.get(name), (int, float))}


def rates(before: Sample, now: Sample) -> dict[str, float]:
    """What was done in between, a second. Tokens are those that detokenizers told of with their heartbeats."""
    seconds = max(now.at - before.at, 1e-9)
    counted = {f"{name}_per_s": now.queue.counters[name] - before.queue.counters[name] for name in overview.COUNTERS}
    earlier = {process.id: load_of(process).get("tokens", 0) for process in before.processes}
    tokens = sum(
        load_of(process).get("tokens", 0) - earlier[process.id] for process in now.processes if process.id in earlier
    )
    return {name: round(count / seconds, 3) for name, count in (counted | {"tokens_per_s": tokens}).items()}


def total(processes: Sequence[ProcessInfo], role: str, name: str) -> float:
    """One number of all processes of a role."""
    return sum(load_of(process).get(name, 0) for process in processes if process.role == role)


def as_json(before: Sample, now: Sample) -> Mapping[str, Any]:
    """The picture for scripts; times in seconds."""
    unix = time.time()
    queue = asdict(now.queue)
    lanes = [{"pool": pool, "lane": lane, **asdict(state)} for (pool, lane), state in now.queue.lanes.items()]
    return {
        "processes": [
            {
                **{name: getattr(process, name) for name in ("role", "id", "host", "pid", "state", "model")},
                "up_s": round(unix - process.started_at),
                **load_of(process),
            }
            for process in now.processes
        ],
        "lanes": lanes,
        "streams": {
            "open": total(now.processes, "api", "open_streams"),
            "decoding": total(now.processes, "detok", "streams"),
        },
        "queue": {name: value for name, value in queue.items() if name not in ("lanes", "counters")},
        "counters": dict(now.queue.counters),
        "rates": rates(before, now),
    }
