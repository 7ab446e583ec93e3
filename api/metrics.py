"""What one replica counts, in Prometheus' terms, in a registry of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..shared.chunks import Usage
from ..shared.overview import Overview
from ..shared.registry import ProcessInfo
from .process_metrics import ProcessMetrics
from .queue_metrics import QueueMetrics

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of the api. Latencies are in seconds, as a client of this process sees them."""

    def __init__(self) -> None:
        self._registry = r = CollectorRegistry()
        self.requests = Counter(
            "headrace_requests", "Generation requests by how they ended", ["model", "endpoint", "outcome"], registry=r
        )
        self.prompt_tokens = Counter("headrace_prompt_tokens", "Tokens of prompts", ["model"], registry=r)
        self.cached_tokens = Counter(
            "headrace_cached_prompt_tokens", "Tokens of prompts found in the prefix cache", ["model"], registry=r
        )
        self.generation_tokens = Counter("headrace_generation_tokens", "Tokens generated", ["model"], registry=r)
        self.time_to_first_token = Histogram(
            "headrace_time_to_first_token_seconds", "From the request to its first text", ["model"],
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.inter_token_latency = Histogram(
            "headrace_inter_token_latency_seconds", "Between tokens of one choice", ["model"],
            buckets=_BETWEEN, registry=r,
        )  # fmt: skip
        self.e2e_latency = Histogram(
            "headrace_e2e_request_latency_seconds", "From the request to its end", ["model"],
            buckets=_SECONDS, registry=r,
        )  # fmt: skip
        self.refused = Counter(
            "headrace_refused_requests", "Requests answered 429, by error code", ["code"], registry=r
        )
        self.slow_readers = Counter(
            "headrace_slow_readers",
            "Streams that waited for a client which read too slowly, and those that were closed for it",
            ["what"],
            registry=r,
        )
        self.open_streams = Gauge("headrace_open_streams", "Streams that clients read now", registry=r)
        self.open_requests = Gauge("headrace_open_requests", "Generation requests in flight here", registry=r)

    def count_tokens(self, model: str, usage: Usage, first_choice: bool) -> None:
        """Count a choice that ended; a prompt counts once, with its first choice."""
        if first_choice:
            self.prompt_tokens.labels(model).inc(usage.prompt_tokens)
            self.cached_tokens.labels(model).inc(usage.cached_tokens)
        self.generation_tokens.labels(model).inc(usage.completion_tokens)

    def page(self, processes: Sequence[ProcessInfo] = (), overview: Overview | None = None) -> bytes:
        """This replica's own, what the deployment's processes say of themselves, and how the queue stands."""
        pages = [generate_latest(self._registry), generate_latest(ProcessMetrics(processes))]
        if overview is not None:
            pages.append(generate_latest(QueueMetrics(overview)))
        return b"".join(pages)

    def stats(self) -> dict[str, float]:
        """What this replica tells with its heartbeats."""
        return {"open_streams": _sum(self.open_streams), "open_requests": _sum(self.open_requests),
                "requests": _sum(self.requests), "refused": _sum(self.refused),
                "slow_readers": _sum(self.slow_readers)}  # fmt: skip


def _sum(metric: Counter | Gauge) -> float:
    """Over all labels."""
    samples = (sample for family in metric.collect() for sample in family.samples)
    return sum(sample.value for sample in samples if not sample.name.endswith("_created"))
