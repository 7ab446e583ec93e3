"""What workers say of themselves with their heartbeats, in Prometheus' terms. Every api replica shows all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..shared.registry import ProcessInfo

LABELS = ("model", "worker")  # a worker by host and slot: names that its successor takes over


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, and the value of its third label for each of the workers' numbers that it shows."""

    name: str
    help: str
    numbers: Mapping[str, str]
    label: str = ""
    counts: bool = True


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
)


class ProcessMetrics:
    """A collector of one page: the processes as they were when it was asked for."""

    def __init__(self, processes: Sequence[ProcessInfo]) -> None:
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        yield self._states()
        workers = [process for process in self._processes if process.role == "worker" and "stats" in process.extra]
        for family in FAMILIES:
            yield _metric(family, workers)

    def _states(self) -> Metric:
        metric = GaugeMetricFamily("headrace_processes", "Live processes", labels=("role", "state"))
        for (role, state), count in sorted(Counter((p.role, p.state) for p in self._processes).items()):
            metric.add_metric((role, state), count)
        return metric


def _metric(family: Family, workers: Iterable[ProcessInfo]) -> Metric:
    kind = CounterMetricFamily if family.counts else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=(*LABELS, family.label) if family.label else LABELS)
    for worker in workers:
        names = (worker.model or "", f"{worker.host}:{worker.extra.get('slot', '')}")
        for number, value in family.numbers.items():
            if number in worker.extra["stats"]:
                metric.add_metric((*names, value) if family.label else names, worker.extra["stats"][number])
    return metric
