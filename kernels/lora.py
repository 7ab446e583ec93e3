"""Low-rank adapters of several requests in one batch: y += (x A^T) B^T, each segment of rows with its own A and B.

    rows       |-- adapter 2 --|-- none --|-- adapter 0 --| …     cu_segments = 0, 5, 7, …;  adapters = 2, -1, 0, …
    shrink     x [T, K]  @  A [rank, K]^T   ->  h [T, largest rank] float32
    expand     h  @  B [N, rank]^T          ->  added to y [T, N]

Factors stay where they were loaded, of any rank: a table holds their addresses. One product serves both ways. Its
programs find their segments as attention's find their sequences, so that the grid follows from the numbers of rows and
segments alone; tiles follow from the linear alone, so that a row sums in one order whatever stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import LEAST_DOT, find_segment, last_dim_dense, power_of_two

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """What several adapters add to one linear.

    Attributes:
        pairs: of each adapter A [rank, K] and B [N, rank], dense, of one dtype, its scale in B; None: it adds nothing.
        pointers: [2, adapters] int64, the addresses of A and B.
        ranks: [adapters] int32; 0 where an adapter adds nothing.
    """

    pairs: tuple[Pair | None, ...]
    pointers: torch.Tensor
    ranks: torch.Tensor

    @classmethod
    def of(cls, pairs: Sequence[Pair | None], device: torch.device) -> LoraFactors:
        addresses = [[0 if pair is None else pair[side].data_ptr() for pair in pairs] for side in (0, 1)]
        ranks = [0 if pair is None else pair[0].shape[0] for pair in pairs]
        assert all(pair is None or all(factor.is_contiguous() for factor in pair) for pair in pairs)
        return cls(tuple(pairs), torch.tensor(addresses, device=device), torch.tensor(ranks, device=device).int())

    @property
    def max_rank(self) -> int:
        return max(0 if pair is None else pair[0].shape[0] for pair in self.pairs)


@triton.jit
def _segments_kernel(
    x: tl.tensor,
    pointers: tl.tensor,
    ranks: tl.tensor,
    out: tl.tensor,
    cu_segments: tl.tensor,
    adapters: tl.tensor,
    num_segments: int,
    x_stride: int,
    out_stride: int,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPAND: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    segment = find_segment(tile, cu_segments, num_segments, ROWS)
    begin = tl.load(cu_segments + segment)
    end = tl.load(cu_segments + segment + 1)
    first_row = begin + (tile - begin // ROWS - segment) * ROWS
    adapter = tl.load(adapters + segment)
    if (adapter < 0) | (first_row >= end):
        return
    rank = tl.load(ranks + adapter)
    size_in = SIZE
    size_out = rank
    dtype = x.dtype.element_ty
    if EXPAND:
        size_in = rank
        size_out = SIZE
        dtype = out.dtype.element_ty
    if (rank == 0) | (tl.program_id(1) * COLUMNS >= size_out):
        return
    factors = tl.load(pointers + adapter).to(tl.pointer_type(dtype))
    row = first_row + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < end, column < size_out
    place = row.to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, size_in, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < size_in
        x_at = x + place[:, None] * x_stride + inner[None, :]
        values = tl.load(x_at, mask=is_row[:, None] & is_inner[None, :], other=0.0).to(dtype)
        factor_at = factors + column[:, None] * size_in + inner[None, :]
        factor = tl.load(factor_at, mask=is_column[:, None] & is_inner[None, :], other=0.0)
        total = tl.dot(values, tl.trans(factor), total, input_precision="ieee")
    at = out + place[:, None] * out_stride + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if EXPAND:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def lora_shrink(
    x: torch.Tensor, factors: LoraFactors, cu_segments: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    """x of each segment times its adapter's A.

    Args:
        x: [T, K] of the factors' dtype.
        cu_segments: [S + 1] int32, rows of segment s are cu_segments[s] … cu_segments[s + 1].
        adapters: [S] int32, places in `factors`; -1 for none.

    Returns:
        [T, largest rank] float32; rows of no adapter, and columns beyond an adapter's rank, are undefined.
    """
    x = last_dim_dense(x)
    out = torch.empty(x.shape[0], factors.max_rank, dtype=torch.float32, device=x.device)
    grid = (x.shape[0] // LEAST_DOT + len(adapters), -(-factors.max_rank // LEAST_DOT))
    _segments_kernel[grid](
        x,
        factors.pointers[0],
        factors.ranks,
        out,
        cu_segments,
        adapters,
        len(adapters),
        x.stride(0),
        out.stride(0),
        SIZE=x.shape[1],
        ROWS=LEAST_DOT,
        INNER=min(power_of_two(x.shape[1], least=LEAST_DOT), 128),
        COLUMNS=LEAST_DOT,
        EXPAND=False,
    )
    return out


def lora_expand(
    h: torch.Tensor, factors: LoraFactors, y: torch.Tensor, cu_segments: torch.Tensor, adapters: torch.Tensor
) -> None:
    """Add h times each segment's B to y, in place.

    Args:
        h: [T, largest rank] float32, of `lora_shrink`.
        y: [T, N] of the factors' dtype, its last dimension dense.
        cu_segments, adapters: as in `lora_shrink`.
    """
    assert y.stride(-1) == 1, "rows of the output are dense"
    columns = min(power_of_two(y.shape[1], least=LEAST_DOT), 64)
    _segments_kernel[(h.shape[0] // LEAST_DOT + len(adapters), -(-y.shape[1] // columns))](
        h,
        factors.pointers[1],
        factors.ranks,
        y,
        cu_segments,
        adapters,
        len(adapters),
        h.stride(0),
        y.stride(0),
        SIZE=y.shape[1],
        ROWS=LEAST_DOT,
        INNER=LEAST_DOT,
        COLUMNS=columns,
        EXPAND=True,
    )


def lora_shrink_reference(
    x: torch.Tensor, factors: LoraFactors, cu_segments: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    """The twin of `lora_shrink`; what is undefined there is zero."""
    out = torch.zeros(x.shape[0], factors.max_rank, dtype=torch.float32, device=x.device)
    for rows, (a, _) in _segments(factors, cu_segments, adapters):
        out[rows, : len(a)] = x[rows].float() @ a.float().T
    return out


def lora_expand_reference(
    h: torch.Tensor, factors: LoraFactors, y: torch.Tensor, cu_segments: torch.Tensor, adapters: torch.Tensor
) -> None:
    """The twin of `lora_expand`."""
    for rows, (_, b) in _segments(factors, cu_segments, adapters):
        y[rows] = (y[rows].float() + h[rows, : b.shape[1]] @ b.float().T).to(y.dtype)


def _segments(factors: LoraFactors, cu_segments: torch.Tensor, adapters: torch.Tensor) -> list[tuple[slice, Pair]]:
    """The rows of each segment that has factors, with them."""
    bounds = cu_segments.tolist()
    pairs = [None if adapter < 0 else factors.pairs[adapter] for adapter in adapters.tolist()]
    return [(slice(bounds[n], bounds[n + 1]), pair) for n, pair in enumerate(pairs) if pair is not None]
