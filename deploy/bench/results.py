"""From samples to numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .samples import Sample
from .settings import Loop

TokenSource = Literal["usage", "events", "both", "none"]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of times in milliseconds; percentiles are interpolated between ranks."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Distribution | None:
        """None of no values."""
        if not values:
            return None
        ms = np.asarray(values, dtype=np.float64) * 1000.0
        p50, p90, p99 = (float(q) for q in np.percentile(ms, (50, 90, 99)))
        return cls(mean=float(ms.mean()), p50=p50, p90=p90, p99=p99, max=float(ms.max()))


@dataclass(frozen=True, slots=True)
class LevelResult:
    """One level of load. Only answered requests count, but for `errors`.

    ttft: from the moment a request was due to its first text. itl: between two events with text of one answer.
    tpot: time per output token after the first one, a mean for each answer. e2e: to the end of the answer.
    `token_source` says who counted `output_tokens`: the server's usage, the events with text, or both in turn.
    """

    loop: Loop
    level: float  # requests in flight, or arrivals a second
    requests: int
    completed: int
    errors: dict[str, int]  # by message
    duration_s: float  # from the first request due to the last answer's end
    input_tokens: int | None  # None where the server sends no usage
    output_tokens: int
    token_source: TokenSource
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    lag_ms: Distribution | None  # how late the generator itself sent what was due
    client_cpu_s: float  # CPU time that the generator took
    client_cpu_share: float  # of one core
    client_us_per_event: float | None


def summarize(loop: Loop, level: float, samples: Sequence[Sample], cpu_s: float) -> LevelResult:
    """The numbers of one level. `cpu_s` is what the generator's process took meanwhile, in seconds of CPU."""
    done = [s for s in samples if s.error is None]
    duration = max((s.end for s in samples), default=0.0) - min((s.start for s in samples), default=0.0)
    output_tokens = sum(s.output_tokens for s in done)
    events = sum(s.chunks for s in samples)
    prompt_tokens = [s.prompt_tokens for s in done if s.prompt_tokens is not None]
    return LevelResult(
        loop=loop,
        level=level,
        requests=len(samples),
        completed=len(done),
        errors=dict(Counter(s.error for s in samples if s.error is not None).most_common()),
        duration_s=duration,
        input_tokens=sum(prompt_tokens) if prompt_tokens else None,
        output_tokens=output_tokens,
        token_source=_token_source(done),
        output_tokens_per_s=_rate(output_tokens, duration),
        requests_per_s=_rate(len(done), duration),
        ttft_ms=Distribution.of_seconds([s.text_times[0] - s.start for s in done if s.text_times]),
        itl_ms=Distribution.of_seconds([b - a for s in done for a, b in itertools.pairwise(s.text_times)]),
        tpot_ms=Distribution.of_seconds([t for s in done if (t := _time_per_token(s)) is not None]),
        e2e_ms=Distribution.of_seconds([s.end - s.start for s in done]),
        lag_ms=Distribution.of_seconds([s.sent - s.start for s in samples]),
        client_cpu_s=cpu_s,
        client_cpu_share=_rate(cpu_s, duration),
        client_us_per_event=cpu_s * 1e6 / events if events else None,
    )


def _token_source(done: Sequence[Sample]) -> TokenSource:
    by_usage = sum(s.completion_tokens is not None for s in done)
    if not done:
        return "none"
    return "usage" if by_usage == len(done) else "both" if by_usage else "events"


def _time_per_token(sample: Sample) -> float | None:
    if len(sample.text_times) < 2 or sample.output_tokens < 2:
        return None
    return (sample.text_times[-1] - sample.text_times[0]) / (sample.output_tokens - 1)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
