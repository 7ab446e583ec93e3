"""Where a worker's time goes, and what it did with it: sums since the start, told with each heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Meter:
    """Seconds by phase. Two readings of a clock for each phase of a step, and nothing is kept of the step itself."""

    def __init__(self, *phases: str) -> None:
        self.seconds = dict.fromkeys(phases, 0.0)

    def timed(self, phase: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`call(…)`, its time added to a phase, also where it raises."""
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds[phase] += time.perf_counter() - began
