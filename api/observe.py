"""Measures each request as its client sees it, while its chunks go by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from ..shared.chunks import TextChunk
from ..shared.errors import Overloaded
from .errors import SlowReader
from .metrics import Metrics
from .plan import Plan


class Observation:
    """One request under way."""

    def __init__(self, metrics: Metrics, plan: Plan) -> None:
        self._metrics = metrics
        self._plan = plan
        self._first_token = metrics.time_to_first_token.labels(plan.model)
        self._between_tokens = metrics.inter_token_latency.labels(plan.model)
        self._began = time.perf_counter()
        self._last: dict[int, tuple[float, int]] = {}  # choice → when it last moved, tokens then

    async def chunks(self, source: AsyncIterator[tuple[int, TextChunk]]) -> AsyncIterator[tuple[int, TextChunk]]:
        """`source`, measured as it passes."""
        async for index, chunk in source:
            self._chunk(index, chunk)
            yield index, chunk

    def _chunk(self, index: int, chunk: TextChunk) -> None:
        now, tokens = time.perf_counter(), chunk.usage.completion_tokens
        if not self._last:
            self._first_token.observe(now - self._began)
        at, before = self._last.get(index, (now, tokens))
        if tokens > before:
            # A chunk of several tokens took its time for each of them alike.
            self._between_tokens.observe((now - at) / (tokens - before))
        self._last[index] = now, tokens
        if chunk.finish is not None:
            self._metrics.count_tokens(self._plan.model, chunk.usage, first_choice=index % self._plan.n == 0)

    def end(self, outcome: str) -> None:
        self._metrics.requests.labels(self._plan.model, self._plan.endpoint, outcome).inc()
        self._metrics.e2e_latency.labels(self._plan.model).observe(time.perf_counter() - self._began)


class Observer:
    """Begins observations."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @contextmanager
    def request(self, plan: Plan) -> Iterator[Observation]:
        """Observe a request until the block is left: `ok`, `refused`, `error` or `cancelled` (its client went)."""
        observation, outcome = Observation(self._metrics, plan), "ok"
        try:
            with self._metrics.open_requests.track_inprogress():
                yield observation
        except (asyncio.CancelledError, GeneratorExit, SlowReader):
            outcome = "cancelled"
            raise
        except Overloaded as e:
            outcome = "refused"
            self._metrics.refused.labels(e.code).inc()
            raise
        except BaseException:
            outcome = "error"
            raise
        finally:
            observation.end(outcome)
