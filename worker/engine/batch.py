"""A step's plan as tensors: the flat batch, and what attention needs to know of it.

    rows      | d0 | d1 | d2 | c0 c0 c0 c0 c0 | c1 c1 |      decoding sequences first, one row each; then chunks
    kv_len      17   130  9          5          64           tokens that a sequence's last row may see

Index arithmetic happens here, in numpy, once per step and kind of layer; the layers only look it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from .blocks import NULL_BLOCK
from .plan import Slice
from .transfers import upload, upload_ints

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """Which K/V rows to gather, and what of it each query sees.

    `index` [sequences * heads * blocks] int64; `bias` is added to the scores, 0 or -inf:
    [sequences, 1, 1, tokens] of decoding sequences, [queries, tokens] of a chunk.
    """

    index: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start … stop` of the flat batch: tokens `kv_len - (stop - start) … kv_len` of one sequence."""

    start: int
    stop: int
    kv_len: int
    table: Ints

    @property
    def num_cached(self) -> int:
        return self.kv_len - (self.stop - self.start)


class AttentionBatch:
    """The part of a step that the attention function reads."""

    def __init__(self, slices: Sequence[Slice], block_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size, self._dtype, self._device = block_size, dtype, device
        decoding = [piece for piece in slices if piece.length == 1]
        self.num_decoding = len(decoding)
        self._kv_lens = np.array([piece.end for piece in decoding], dtype=np.int64)
        self._tables = _padded([piece.sequence.block_table for piece in decoding], self._kv_lens, block_size)
        self.chunks = _chunks(slices[len(decoding) :], self.num_decoding)
        self._store: dict[int, torch.Tensor] = {}
        self._views: dict[tuple[int, int, int | None], View] = {}

    def store_index(self, heads: int) -> torch.Tensor:
        """[heads * T] int64: where each row's K/V goes in a layer of so many heads."""
        if heads not in self._store:
            blocks, offsets = self.places()
            rows = blocks[None, :] * heads + np.arange(heads)[:, None]
            self._store[heads] = self._tensor((rows * self._block_size + offsets[None, :]).ravel())
        return self._store[heads]

    def decode_view(self, heads: int, window: int | None) -> View:
        """K/V of all decoding sequences, padded to the longest, or to the sliding window."""
        key = (-1, heads, window)
        if key not in self._views:
            lens, size = self._kv_lens, self._block_size
            first = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // size
            count = int((-(-lens // size) - first).max())
            columns = first[:, None] + np.arange(count)[None, :]
            inside = columns < self._tables.shape[1]
            tables = np.where(inside, np.take_along_axis(self._tables, np.where(inside, columns, 0), 1), NULL_BLOCK)
            position = first[:, None] * size + np.arange(count * size)[None, :]
            seen = position < lens[:, None]
            if window is not None:
                seen &= position >= lens[:, None] - window
            self._views[key] = View(self._rows(tables, heads), self._bias(seen)[:, None, None, :])
        return self._views[key]

    def chunk_view(self, number: int, heads: int, window: int | None) -> View:
        """K/V of one chunk's sequence, from its first visible block."""
        key = (number, heads, window)
        if key not in self._views:
            chunk, size = self.chunks[number], self._block_size
            first = 0 if window is None else max(chunk.num_cached - window + 1, 0) // size
            tables = chunk.table[None, first : -(-chunk.kv_len // size)]
            query = np.arange(chunk.num_cached, chunk.kv_len)[:, None]
            position = np.arange(first * size, first * size + tables.shape[1] * size)[None, :]
            seen = position <= query
            if window is not None:
                seen &= position > query - window
            self._views[key] = View(self._rows(tables, heads), self._bias(seen))
        return self._views[key]

    def places(self) -> tuple[Ints, Ints]:
        """Block and offset of each row of the flat batch."""
        newest = self._kv_lens - 1
        positions, tables = [newest], [self._tables[np.arange(len(newest)), newest // self._block_size]]
        for chunk in self.chunks:
            place = np.arange(chunk.num_cached, chunk.kv_len)
            positions.append(place)
            tables.append(chunk.table[place // self._block_size])
        return np.concatenate(tables), np.concatenate(positions) % self._block_size

    def kv_lens(self) -> Ints:
        """[sequences] tokens that the last row of each may see."""
        if not self.chunks:
            return self._kv_lens
        return np.concatenate([self._kv_lens, np.array([chunk.kv_len for chunk in self.chunks], dtype=np.int64)])

    def tables(self) -> Ints:
        """[sequences, blocks of the longest] block tables, filled up with the null block."""
        if not self.chunks:
            return self._tables
        tables = [*self._tables, *(chunk.table for chunk in self.chunks)]
        out = np.full((len(tables), max(len(table) for table in tables)), NULL_BLOCK, dtype=np.int64)
        for row, table in zip(out, tables, strict=True):
            row[: len(table)] = table
        return out

    def _rows(self, tables: Ints, heads: int) -> torch.Tensor:
        return self._tensor((tables[:, None, :] * heads + np.arange(heads)[None, :, None]).ravel())

    def _bias(self, seen: npt.NDArray[np.bool_]) -> torch.Tensor:
        bias = np.where(seen, np.float32(0), np.float32(-np.inf))
        return upload(bias, self._device).to(self._dtype)

    def _tensor(self, values: Ints) -> torch.Tensor:
        return upload(values, self._device)


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """A step's input: `input_ids` and `position_ids` [1, T] int64, whose logits are wanted, and attention's part.

    `slices` stand in the order of their rows. `logit_rows` [S + P] int64: those that are sampled from, then those that
    tell of a prompt's tokens.
    """

    slices: tuple[Slice, ...]
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    logit_rows: torch.Tensor
    attention: AttentionBatch

    @classmethod
    def build(cls, slices: Sequence[Slice], block_size: int, *, dtype: torch.dtype, device: torch.device) -> FlatBatch:
        ordered = tuple(sorted(slices, key=lambda piece: piece.length > 1))  # stable: decoding ones come first
        ids = [i for piece in ordered for i in piece.token_ids]
        positions = [position for piece in ordered for position in range(piece.start, piece.end)]
        ends = list(accumulate(piece.length for piece in ordered))
        rows = [row for piece, end in zip(ordered, ends, strict=True) for row in range(end - piece.num_sampled, end)]
        for piece, end in zip(ordered, ends, strict=True):
            rows += [place + end - piece.end for place in piece.scored]
        tensors = [upload_ints(values, device) for values in (ids, positions, rows)]
        attention = AttentionBatch(ordered, block_size, dtype=dtype, device=device)
        return cls(ordered, tensors[0][None], tensors[1][None], tensors[2], attention)


def _padded(tables: Sequence[list[int]], kv_lens: Ints, block_size: int) -> Ints:
    """Block tables as one array [sequences, blocks of the longest], filled up with the null block."""
    width = -(-int(kv_lens.max(initial=0)) // block_size)
    out = np.full((len(tables), width), NULL_BLOCK, dtype=np.int64)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def _chunks(slices: Sequence[Slice], row: int) -> tuple[Chunk, ...]:
    chunks = []
    for piece in slices:
        table = np.array(piece.sequence.block_table, dtype=np.int64)
        chunks.append(Chunk(row, row + piece.length, piece.end, table))
        row += piece.length
    return tuple(chunks)
