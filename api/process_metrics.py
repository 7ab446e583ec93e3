"""What the roles say of themselves with their heartbeats, in Prometheus' terms. Every api replica shows all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..shared.registry import ProcessInfo, Role


@dataclass(frozen=True, slots=True)
class Family:
    """A metric of one role, and the value of its last label for each of the processes' numbers that it shows."""

    name: str
    help: str
    numbers: Mapping[str, str]
    label: str = ""
    counts: bool = True
    role: Role = "worker"


FAMILIES = (
    Family("headrace_worker_steps", "Steps of the engine", {"steps": ""}),
    Family(
        "headrace_worker_phase_seconds",
        "Time of the loop by what it was spent on; on a GPU, sample waits for forward",
        {f"{phase}_seconds": phase for phase in ("pull", "schedule", "forward", "sample", "publish")},
        "phase",
    ),
    Family(
        "headrace_worker_tokens",
        "Tokens computed: sampled from, or a prompt's (again after a preemption)",
        {"decode_tokens": "decode", "prefill_tokens": "prefill"},
        "kind",
    ),
    Family(
        "headrace_worker_draft_tokens",
        "Tokens guessed ahead, and those of them that were right",
        {"draft_tokens": "drafted", "accepted_tokens": "accepted"},
        "outcome",
    ),
    Family("headrace_worker_prefix_queried_tokens", "Tokens looked for in the cache", {"prefix_queried_tokens": ""}),
    Family("headrace_worker_prefix_hit_tokens", "Tokens found in the cache", {"prefix_hit_tokens": ""}),
    Family("headrace_worker_preemptions", "Sequences that lost their K/V to others", {"preemptions": ""}),
    Family(
        "headrace_worker_sequences",
        "Sequences in the engine",
        {"sequences_running": "running", "sequences_waiting": "waiting"},
        "state",
        counts=False,
    ),
    Family("headrace_worker_kv_blocks", "Blocks of the K/V pool", {"kv_blocks": ""}, counts=False),
    Family("headrace_worker_kv_blocks_used", "Blocks that sequences own", {"kv_blocks_used": ""}, counts=False),
    Family(
        "headrace_worker_lease_age_seconds",
        "Since the lease of a held request was renewed, at most",
        {"lease_age_s": ""},
        counts=False,
    ),
    Family("headrace_worker_lease_seconds", "The lease that it asks for", {"lease_s": ""}, counts=False),
    Family("headrace_detok_tokens", "Tokens decoded and published", {"tokens": ""}, role="detok"),
    Family("headrace_detok_chunks", "Chunks of text published", {"chunks": ""}, role="detok"),
    Family("headrace_detok_rereads", "Choices read anew: Redis held another position", {"rereads": ""}, role="detok"),
    Family("headrace_detok_streams", "Choices being decoded", {"streams": ""}, counts=False, role="detok"),
    Family("headrace_detok_shards", "Shards leased", {"shards": ""}, counts=False, role="detok"),
    Family("headrace_batch_slices", "Slices of batches driven", {"slices": ""}, role="batch"),
    Family("headrace_batch_driving", "Batches being driven now", {"driving": ""}, counts=False, role="batch"),
)


class ProcessMetrics:
    """A collector of one page: the processes as they were when it was asked for."""

    def __init__(self, processes: Sequence[ProcessInfo]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        yield self._states()
        for family in FAMILIES:
            yield _metric(family, (p for p in self._processes if p.role == family.role and "stats" in p.extra))

    def _states(self) -> Metric:
        metric = GaugeMetricFamily("headrace_processes", "Live processes", labels=("role", "state"))
        for (role, state), count in sorted(Counter((p.role, p.state) for p in self._processes).items()):
            metric.add_metric((role, state), count)
        return metric


def _names(process: ProcessInfo) -> dict[str, str]:
    """The labels that tell it from others: a worker's are host and slot, which its successor takes over."""
    if process.role == "worker":
        return {"model": process.model or "", "worker": f"{process.host}:{process.extra.get('slot', '')}"}
    return {"process": f"{process.host}:{process.pid}"}


def _metric(family: Family, processes: Iterable[ProcessInfo]) -> Metric:
    kind = CounterMetricFamily if family.counts else GaugeMetricFamily
    own = ("model", "worker") if family.role == "worker" else ("process",)
    metric = kind(family.name, family.help, labels=(*own, family.label) if family.label else own)
    for process in processes:
        names = tuple(_names(process).values())
        for number, value in family.numbers.items():
            if number in process.extra["stats"]:
                metric.add_metric((*names, value) if family.label else names, process.extra["stats"][number])
    return metric
