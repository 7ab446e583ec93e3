"""SIGTERM and SIGINT: the first drains, the second is immediate."""

from __future__ import annotations

import signal
from types import FrameType


class StopSignal:
    """Counts the signals that ask this process to stop. Main thread only."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    @property
    def draining(self) -> bool:
        return self.count > 0

    @property
    def immediate(self) -> bool:
        return self.count > 1
