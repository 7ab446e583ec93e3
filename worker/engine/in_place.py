"""Where a model that serves keeps each tensor of its checkpoint, so that another checkpoint's can be put there.

    name in the files ──► cells: a parameter, rows of packed panels (q/k/v are one product), 1 + a norm's weight, …

Names tell where to look, numbers decide: the map is used only where every tensor of the checkpoint that serves was
found again behind it, bit for bit. A model whose weights lie otherwise (quantised ones, transposed or renamed ones) has
no map, and is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...kernels.cpu import linear as kernels
from ...kernels.cpu.panels import PANEL
from .checkpoint import Checkpoint
from .fuse import FusedRMSNorm
from .linear import PackedLinear, Part
from .quantized import is_quantized

Ties = list[list[str]]  # names of one tensor: most have one


class Cells(Protocol):
    """Rows of one tensor as they are kept."""

    def read(self, first: int, count: int) -> torch.Tensor: ...

    def write(self, first: int, rows: torch.Tensor) -> None: ...

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """What `read` gives after `write`."""
        ...


@dataclass(frozen=True, slots=True)
class _Plain:
    """A parameter or buffer [rows, columns]; `plus` is what was added to it when it was loaded."""

    tensor: torch.Tensor
    plus: float = 0.0

    def read(self, first: int, count: int) -> torch.Tensor:
        return self.tensor[first : first + count]

    def write(self, first: int, rows: torch.Tensor) -> None:
        self.tensor[first : first + len(rows)] = self.stored(rows)

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self.tensor)
        return rows + self.plus if self.plus else rows


@dataclass(frozen=True, slots=True)
class _Panels:
    """Outputs of a packed linear, from `begin` on."""

    linear: PackedLinear
    begin: int

    def read(self, first: int, count: int) -> torch.Tensor:
        start, panel = self.begin + first, (self.begin + first) // PANEL
        skip = start - panel * PANEL
        return kernels.unpack(self._panels(start, count), skip + count)[skip:]

    def write(self, first: int, rows: torch.Tensor) -> None:
        start = self.begin + first
        panels = self._panels(start, len(rows))
        whole = kernels.unpack(panels, len(panels) * PANEL)
        whole[start % PANEL : start % PANEL + len(rows)] = self.stored(rows)
        panels.copy_(kernels.pack(whole))

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.linear.panels.dtype)

    def _panels(self, start: int, count: int) -> torch.Tensor:
        return self.linear.panels[start // PANEL : -(-(start + count) // PANEL)]


def ties_of(model: Any) -> Ties | None:
    """The names under which a model that was just loaded keeps its tensors; None where files name them otherwise."""
    if is_quantized(model) or any(isinstance(module, Conv1D) for module in model.modules()):
        return None
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in model.state_dict().items():
        groups.setdefault((tensor.data_ptr(), tuple(tensor.shape)), []).append(name)
    return list(groups.values())


class InPlace:
    """The tensors of a model, by their names in its files.

    Args:
        served: the checkpoint that it was loaded from.
        cells: where each of its tensors is kept.
        others: second names of tensors, which no file may use.
    """

    def __init__(self, served: Checkpoint, cells: dict[str, list[Cells]], others: set[str]) -> None:
        self._served = served
        self._cells = cells
        self._others = others

    @classmethod
    def of(cls, model: nn.Module, ties: Ties | None, served: Checkpoint) -> InPlace | None:
        """Of a model that was rewritten and tried, with the names that it had before; None where a tensor is not to be
        found."""
        cells: dict[str, list[Cells]] = {}
        others: set[str] = set()
        for names in ties or ():
            known = [name for name in names if name in served.tensors]
            found = [cell for name in names if (cell := _cells_of(model, name)) is not None]
            if len(known) != 1 or len(found) != len(names) or served.tensors[known[0]].dtype is None:
                return None
            cells[known[0]] = found
            others.update(set(names) - set(known))
        return cls(served, cells, others) if cells else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._served.tensors[name].shape for name in self._cells}

    def takes(self, new: Checkpoint) -> bool:
        """Whether files of the right names and shapes say no more than the places hold. Reads no weights."""
        kinds = {name: new.tensors[name].dtype for name in self._cells}
        return self._others.isdisjoint(new.tensors) and all(kind is not None for kind in kinds.values())

    @torch.inference_mode()
    def proven(self, check: Callable[[], None]) -> bool:
        """Whether what serves is the checkpoint that was loaded, bit for bit, and stands where the map says.

        Args:
            check: called after every few rows; raises where nobody waits for the answer any more.
        """
        for first, rows, cells in self._all(self._served):
            check()
            if not all(torch.equal(cell.read(first, len(rows)), cell.stored(rows)) for cell in cells):
                return False
        return True

    @torch.inference_mode()
    def loses(self, new: Checkpoint, check: Callable[[], None]) -> bool:
        """Whether panels of fewer bits would round what the files say. `check` as for `proven`.

        Raises:
            NotFinite: a tensor holds NaN or infinity.
        """
        loses = False
        for name in self._cells:
            for _, rows in new.rows(name):
                check()
                if not bool(rows.isfinite().all()):
                    raise NotFinite(f"{name} is not finite")
                panels = (cell for cell in self._cells[name] if isinstance(cell, _Panels))
                loses |= any(not torch.equal(cell.stored(rows).to(rows.dtype), rows) for cell in panels)
        return loses

    @torch.inference_mode()
    def put(self, new: Checkpoint) -> None:
        """Write `new` into the model. Where that fails half way, what served before is written back.

        Raises:
            Unreadable: as `Checkpoint.rows`; of the old files, too, where they were changed as well: then the model
                holds neither, and the process must end.
        """
        try:
            self._write(new)
        except BaseException:
            self._write(self._served)
            raise
        self._served = new

    def _write(self, source: Checkpoint) -> None:
        for first, rows, cells in self._all(source):
            for cell in cells:
                cell.write(first, rows)

    def _all(self, source: Checkpoint) -> Iterator[tuple[int, torch.Tensor, list[Cells]]]:
        for name, cells in self._cells.items():
            for first, rows in source.rows(name):
                yield first, rows, cells


class NotFinite(Exception):
    """A checkpoint that no answer could come from."""


def _cells_of(model: nn.Module, name: str) -> Cells | None:
    """Where a rewritten model keeps the tensor `name`."""
    path, _, attribute = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    if isinstance(module, (PackedLinear, Part)):
        linear, begin = (module.together.whole, module.begin) if isinstance(module, Part) else (module, 0)
        if linear.scales is not None:  # int8: scales follow from whole rows, and stand in two places
            return None
        if attribute == "weight":
            return _Panels(linear, begin)
        bias = linear.padded_bias
        return None if bias is None else _Plain(bias[None, begin : begin + module.out_features])
    kept = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    tensor = kept.get(attribute)  # no attribute that is made when it is asked for
    if tensor is None or not tensor.is_contiguous():
        return None
    plus = float(isinstance(module, FusedRMSNorm) and module.folds_one)
    return _Plain(tensor.detach().view(-1, tensor.shape[-1] if tensor.dim() else 1), plus)
