"""How the queue stands, in Prometheus' terms: the same from every api replica, so sum over none of them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..shared.overview import COUNTERS, Overview


class QueueMetrics:
    """A collector of one page."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview

    def collect(self) -> Iterator[Metric]:
        for name, meaning in COUNTERS.items():
            yield CounterMetricFamily(f"headrace_queue_{name}", meaning, value=self._overview.counters[name])
        yield from self._lanes()
        yield from self._whole()

    def _lanes(self) -> Iterator[Metric]:
        labels = ("pool", "lane")
        waiting = GaugeMetricFamily("headrace_queue_waiting", "Choices that wait for a worker", labels=labels)
        running = GaugeMetricFamily("headrace_queue_running", "Choices that a worker holds", labels=labels)
        oldest = GaugeMetricFamily(
            "headrace_queue_oldest_seconds", "Age of the oldest choice that waits; 0: none does", labels=labels
        )
        taken = GaugeMetricFamily(
            "headrace_queue_taken_per_second", "Choices that left the queue for workers lately", labels=labels
        )
        for key, lane in self._overview.lanes.items():
            waiting.add_metric(key, lane.waiting)
            running.add_metric(key, lane.running)
            oldest.add_metric(key, lane.oldest_s or 0.0)
            taken.add_metric(key, lane.taken_per_s)
        yield from (waiting, running, oldest, taken)

    def _whole(self) -> Iterator[Metric]:
        one, o = GaugeMetricFamily, self._overview
        yield one("headrace_queue_unfinished", "Choices that have not reached their end", value=o.unfinished)
        yield one("headrace_queue_overdue_seconds", "How long the sweep is behind", value=o.overdue_s)
        yield one("headrace_queue_dead_letters", "Poison requests that are kept for a look", value=o.dead_letters)
        yield one("headrace_queue_text_bytes", "Finished text that is kept for its readers", value=o.text_bytes)
        shards = one("headrace_shards", "Shards by whether a detokenizer leases them", labels=("state",))
        shards.add_metric(("leased",), o.shards_leased)
        shards.add_metric(("free",), o.shards_free)
        yield shards
        yield one(
            "headrace_shard_free_seconds", "How long a shard has had no detokenizer, at most", value=o.shard_free_s
        )
