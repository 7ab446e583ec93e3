"""What the adapters of one step add to its linears: one adapter after the other, or all by the same two launches.

rows     | d0 | d1 | d2 | c0 c0 c0 c0 |
adapter    A    -    B        A             A: rows 0, 3 … 6 · B: row 2 · row 1 costs nothing
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from .adapter import Adapter
from .plan import Slice
from .transfers import upload

if TYPE_CHECKING:
    from ...kernels.lora import LoraFactors

# Rows `start … stop` of a step, and their adapter.
Run = tuple[int, int, Adapter | None]


class Step(Protocol):
    """A step in which `total` rows run, some of them with an adapter."""

    @property
    def total(self) -> int: ...

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to a linear's output what its rows' adapters add. x [total, in]; y [total, out], its rows dense."""
        ...


class Planner(Protocol):
    def plan(self, slices: Iterable[Slice], loaded: Collection[Adapter]) -> Step | None:
        """A step over slices in the order of their rows; None where no adapter is among them."""
        ...


def _runs(slices: Iterable[Slice]) -> list[Run]:
    runs: list[Run] = []
    row = 0
    for piece in slices:
        adapter, end = piece.sequence.adapter, row + piece.length
        if runs and runs[-1][2] is adapter:
            runs[-1] = runs[-1][0], end, adapter
        else:
            runs.append((row, end, adapter))
        row = end
    return runs


@dataclass(frozen=True, slots=True)
class _Group:
    """The rows of one adapter: a run of them, or an index [rows] int64."""

    adapter: Adapter
    rows: slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class _OneByOne:
    groups: Sequence[_Group]
    total: int

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        for group in self.groups:
            factors = group.adapter.factors.get(path)
            if factors is None:
                continue
            delta = factors(x[group.rows])
            if isinstance(group.rows, slice):
                y[group.rows] += delta
            else:
                y.index_add_(0, group.rows, delta)


class OneByOne:
    """Answers to `Planner`, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def plan(self, slices: Iterable[Slice], loaded: Collection[Adapter]) -> Step | None:
        runs = _runs(slices)
        rows: dict[Adapter, list[tuple[int, int]]] = {}
        for start, stop, adapter in runs:
            if adapter is not None:
                rows.setdefault(adapter, []).append((start, stop))
        groups = [_Group(adapter, self._rows(mine)) for adapter, mine in rows.items()]
        return _OneByOne(groups, runs[-1][1]) if groups else None

    def _rows(self, runs: Sequence[tuple[int, int]]) -> slice | torch.Tensor:
        if len(runs) == 1:
            return slice(*runs[0])
        return upload(np.concatenate([np.arange(start, stop) for start, stop in runs]), self._device)


class Grouped:
    """Answers to `Planner` by Triton's kernels: two launches a linear, however many adapters there are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._adapters: list[Adapter] = []  # in the order of the tables
        self._tables: dict[str, LoraFactors | None] = {}

    def plan(self, slices: Iterable[Slice], loaded: Collection[Adapter]) -> Step | None:
        runs = _runs(slices)
        running = [adapter for _, _, adapter in runs if adapter is not None]
        adapters = list(dict.fromkeys((*loaded, *running)))
        if adapters != self._adapters:
            self._adapters, self._tables = adapters, {}
        if not running:
            return None
        bounds = np.array([0, *(stop for _, stop, _ in runs)], dtype=np.int32)
        places = [-1 if adapter is None else adapters.index(adapter) for _, _, adapter in runs]
        numbers = np.array(places, dtype=np.int32)
        return _GroupedStep(self, upload(bounds, self._device), upload(numbers, self._device), runs[-1][1])

    def table(self, path: str) -> LoraFactors | None:
        """The factors of all adapters at one linear; None where none has any."""
        if path not in self._tables:
            from ...kernels.lora import LoraFactors

            found = [adapter.factors.get(path) for adapter in self._adapters]
            pairs = [None if factors is None else (factors.a, factors.b) for factors in found]
            self._tables[path] = LoraFactors.of(pairs, self._device) if any(pairs) else None
        return self._tables[path]


@dataclass(frozen=True, slots=True)
class _GroupedStep:
    tables: Grouped
    cu_segments: torch.Tensor
    adapters: torch.Tensor
    total: int

    def add(self, path: str, x: torch.Tensor, y: torch.Tensor) -> None:
        from ...kernels.lora import lora_expand, lora_shrink

        table = self.tables.table(path)
        if table is not None:
            h = lora_shrink(x, table, self.cu_segments, self.adapters)
            lora_expand(h, table, y, self.cu_segments, self.adapters)
