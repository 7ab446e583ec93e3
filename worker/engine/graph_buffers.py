"""What CUDA graphs read and write: tensors that stay where they are, and what fills them for each step."""

from __future__ import annotations

from collections.abc import Sequence as Steps
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .device_sampler import SamplingColumns
from .plan import Slice
from .sequence import Sequence
from .transfers import pinned


@dataclass(frozen=True, slots=True)
class Buffers:
    """What graphs read and write, as large as the largest bucket."""

    longs: torch.Tensor  # [3, B] int64: input_ids, position_ids, slot_mapping
    kv_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, W] int32
    floats: torch.Tensor  # [3, B] float32: temperature, top-p, min-p
    top_ks: torch.Tensor  # [B] int32
    keys: torch.Tensor  # [B, 2] int32
    logits: torch.Tensor  # [B, V] float32, out
    tokens: torch.Tensor  # [B] int64, out: -1 where the logits were not finite

    @classmethod
    def allocate(cls, rows: int, table_width: int, vocab_size: int, device: torch.device) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            longs=zeros(3, rows, dtype=torch.int64),
            kv_lens=zeros(rows, dtype=torch.int32),
            block_tables=zeros(rows, table_width, dtype=torch.int32),
            floats=zeros(3, rows, dtype=torch.float32),
            top_ks=zeros(rows, dtype=torch.int32),
            keys=zeros(rows, 2, dtype=torch.int32),
            logits=zeros(rows, vocab_size, dtype=torch.float32),
            tokens=zeros(rows, dtype=torch.int64),
        )


class BufferWriter:
    """Copies steps into buffers. What stays from one step to the next, sampling parameters and most of the block
    tables, is written only when it changes."""

    def __init__(self, buffers: Buffers, block_size: int) -> None:
        self._buffers = buffers
        self._block_size = block_size
        self._tables = np.zeros(buffers.block_tables.shape, dtype=np.int32)
        self.forget()

    def forget(self) -> None:
        """Trust nothing of the last step: sequences may have been computed otherwise since, into other blocks."""
        self._sequences: list[Sequence] = []
        self._widths: list[int] = []  # blocks of each row's table that are written
        self._sampling = SamplingColumns([], len(self._tables))

    def write(self, slices: Steps[Slice]) -> None:
        """Copy a step in; rows behind it become padding. Nothing waits for the device."""
        b, count = self._buffers, len(slices)
        sequences = [piece.sequence for piece in slices]
        if sequences != self._sequences:
            self._sequences, self._widths = sequences, [0] * count
            self._sampling = SamplingColumns(sequences, len(self._tables))
            _copy(b.floats, self._sampling.floats)
            _copy(b.top_ks, self._sampling.top_ks)
        if self._update_tables(sequences):
            width = max(self._widths)
            _copy(b.block_tables[:count, :width], np.ascontiguousarray(self._tables[:count, :width]))
        starts = np.fromiter((piece.start for piece in slices), np.int64, count)
        longs = np.zeros((3, len(self._tables)), dtype=np.int64)
        longs[0, :count] = [piece.sequence.token_ids[piece.start] for piece in slices]
        longs[1, :count] = starts
        longs[2] = -1
        blocks = self._tables[np.arange(count), starts // self._block_size].astype(np.int64)
        longs[2, :count] = blocks * self._block_size + starts % self._block_size
        kv_lens = np.zeros(len(self._tables), dtype=np.int32)
        kv_lens[:count] = starts + 1
        _copy(b.longs, longs)
        _copy(b.kv_lens, kv_lens)
        _copy(b.keys, self._sampling.keys())

    def _update_tables(self, sequences: list[Sequence]) -> bool:
        """Bring the host's tables up to date; whether anything has changed. Tables only grow while a sequence runs."""
        changed = False
        for row, sequence in enumerate(sequences):
            width = len(sequence.block_table)
            if width != self._widths[row]:
                self._tables[row, :width] = sequence.block_table
                self._widths[row] = width
                changed = True
        return changed


def _copy(buffer: torch.Tensor, values: npt.NDArray[Any]) -> None:
    buffer.copy_(pinned(values, buffer.device), non_blocking=True)
