"""Launches recorded once and run again as one: a decoding step is some three hundred of them, all alike but for the
numbers in its tensors.

    record:  each launch of a kernel notes its words and does not run; its output lies in memory that stays
    run:     thread 0  launch 0 ┤ launch 1 ┤ launch 2 …          ┤ a barrier: all pieces of a launch are done
             thread 1  launch 0 ┤ launch 1 ┤ launch 2 …

Between two launches stands a barrier of a few hundred nanoseconds, where a launch from Python costs some ten
microseconds, of which the other threads do nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from . import team
from .team import arrive, arrived, call, integers_at, pause, team_size

_PATIENCE = 20_000  # turns that a thread waits for the others before it lets the system run something else


class Memory:
    """Where recorded launches put their outputs. Programs that never run at the same time share one.

    It has two halves, since a layer reads what the one before it wrote: `turn` moves to the other, whose tensors are
    then written anew.

    Args:
        max_rows: of any tensor.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._halves: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._half = self._next = 0

    def turn(self) -> None:
        self._half, self._next = 1 - self._half, 0

    def empty(self, rows: int, *shape: int) -> torch.Tensor:
        """[rows, *shape] float32, which stays where it is as long as anyone knows it."""
        half, width = self._halves[self._half], int(np.prod(shape))
        if self._next == len(half):
            half.append(torch.empty(self.max_rows, width, dtype=torch.float32))
        if half[self._next].shape[1] != width:
            half[self._next] = torch.empty(self.max_rows, width, dtype=torch.float32)
        out = half[self._next][:rows].view(rows, *shape)
        self._next += 1
        return out


class Program:
    """A sequence of launches.

    Tensors that were given to the launches must stay where they are and what they are; their numbers may change from
    one run to the next.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: list[Any] = []
        self._launches: list[tuple[int, tuple[int, ...]]] = []
        self._words = self._code = self._entries = np.zeros(0, dtype=np.int64)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Note what is launched within."""
        assert team.recording is None
        team.recording = self
        try:
            yield
        finally:
            team.recording = None
        width = 1 + max(len(arguments) for _, arguments in self._launches)
        self._entries = np.array([entry for entry, _ in self._launches], dtype=np.int64)
        self._code = np.zeros((len(self._launches), width), dtype=np.int64)
        for number, (_, arguments) in enumerate(self._launches):
            self._code[number, 1 : 1 + len(arguments)] = arguments
        self._words = np.array(
            [0, self._entries.ctypes.data, self._code.ctypes.data, len(self._launches), 8 * width,
             team.TEAM_SIZE, _YIELD], dtype=np.int64,
        )  # fmt: skip

    def add(self, entry: int, arguments: tuple[int, ...]) -> None:
        """A launch of the kernel at `entry`. `kernel` calls this."""
        self._launches.append((entry, arguments))

    def empty(self, rows: int, *shape: int) -> torch.Tensor:
        """Memory for a launch's output. `team.empty` calls this."""
        out = self._memory.empty(rows, *shape)
        self._kept.append(out)
        return out

    def keep(self, *tensors: torch.Tensor) -> None:
        """Tensors that must live as long as the program."""
        self._kept += tensors

    def run(self) -> None:
        self._code[:, 0] = 0  # no piece of any launch is taken
        self._words[0] = 0
        team.run(_execute(), self._words.ctypes.data)


_YIELD = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0


@team.entry
def _execute(words):
    entries, code, count, stride = integers_at(words[1]), words[2], words[3], words[4]
    threads = team_size(words[5])
    for number in range(count):
        call(entries[number], code + number * stride)
        arrive(words)
        turns = 0
        while arrived(words) < threads * (number + 1):
            turns += 1
            if turns < _PATIENCE:
                pause()
            else:
                call(words[6], 0)
