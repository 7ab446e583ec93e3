"""How fast this machine steps, and what follows from it: leases that outlast a step, threads that do not spin."""

from __future__ import annotations

import os

MOST_LEASE_S = 60.0
STEPS_PER_LEASE = 4  # a lease is renewed once a step, and a step may take longer than the last one did


class Pace:
    """The lease that a worker asks for. It grows with its steps: a slow worker is not a lost one.

    Args:
        lease_s: the lease of a worker whose steps are short.
    """

    def __init__(self, lease_s: float) -> None:
        self._least_s = lease_s
        self._slowest_s = 0.0  # of the recent steps

    def measure(self, step_s: float) -> None:
        """Take note of a step; what lies far back counts less."""
        self._slowest_s = max(step_s, 0.95 * self._slowest_s)

    @property
    def lease_s(self) -> float:
        return max(self._least_s, min(STEPS_PER_LEASE * self._slowest_s, MOST_LEASE_S))


def calm_threads() -> None:
    """Have OpenMP's threads sleep soon when they wait for each other. Call before torch is loaded.

    By default GNU's spin for milliseconds, on cores that the api, the detokenizer and Redis need: on a busy machine a
    step then takes many times as long. Who has set either variable is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
