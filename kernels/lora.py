"""Low-rank adapters of several requests in one batch: y += scale * (x A^T) B^T, each segment of rows with its own A, B.

    rows       |-- adapter 2 --|-- none --|-- adapter 0 --| …     cu_segments = 0, 5, 7, …;  adapters = 2, -1, 0, …
    shrink     x [T, K]  @  a[adapter] [rank, K]^T   ->  h [T, rank] float32
    expand     h [T, rank]  @  b[adapter] [N, rank]^T, times scales[adapter]  ->  added to y [T, N]

One product serves both. Its programs find their segments as attention's find their sequences, so that the grid follows
from the numbers of rows and segments alone; rows of no adapter are skipped (shrink leaves them undefined).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import LEAST_DOT, find_segment, last_dim_dense, power_of_two


@triton.jit
def _segments_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    cu_segments: tl.tensor,
    adapters: tl.tensor,
    scales: tl.tensor,
    num_segments: int,
    x_stride: int,
    weights_stride_adapter: int,
    weights_stride_row: int,
    out_stride: int,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    segment = find_segment(tile, cu_segments, num_segments, ROWS)
    begin = tl.load(cu_segments + segment)
    end = tl.load(cu_segments + segment + 1)
    row = begin + (tile - begin // ROWS - segment) * ROWS + tl.arange(0, ROWS)
    adapter = tl.load(adapters + segment).to(tl.int64)
    if (adapter < 0) | (begin + (tile - begin // ROWS - segment) * ROWS >= end):
        return
    is_row = row < end
    place = row.to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE_OUT
    dtype = weights.dtype.element_ty
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE_IN, INNER):
        inner = start + tl.arange(0, INNER)
        is_inner = inner < SIZE_IN
        x_at = x + place[:, None] * x_stride + inner[None, :]
        values = tl.load(x_at, mask=is_row[:, None] & is_inner[None, :], other=0.0).to(dtype)
        w_at = weights + adapter * weights_stride_adapter + column[:, None] * weights_stride_row + inner[None, :]
        factors = tl.load(w_at, mask=is_column[:, None] & is_inner[None, :], other=0.0)
        total += tl.dot(values, tl.trans(factors), input_precision="ieee")
    at = out + place[:, None] * out_stride + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    if ADD:
        total = total * tl.load(scales + adapter) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    cu_segments: torch.Tensor,
    adapters: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:
    assert out.stride(-1) == 1, "rows of the output are contiguous"
    x, weights = last_dim_dense(x), last_dim_dense(weights)
    size_out, size_in = weights.shape[1:]
    # Adapters are narrow on one side: few columns a program when shrinking, so that there are enough programs.
    rows, columns = LEAST_DOT, min(power_of_two(size_out, least=LEAST_DOT), 16 if scales is None else 64)
    grid = (x.shape[0] // rows + len(adapters), -(-size_out // columns))
    _segments_kernel[grid](
        x,
        weights,
        out,
        cu_segments,
        adapters,
        adapters if scales is None else scales,
        len(adapters),
        x.stride(0),
        *weights.stride()[:2],
        out.stride(0),
        SIZE_IN=size_in,
        SIZE_OUT=size_out,
        ROWS=rows,
        INNER=min(power_of_two(size_in, least=LEAST_DOT), 128),
        COLUMNS=columns,
        ADD=scales is not None,
    )


def lora_shrink(x: torch.Tensor, a: torch.Tensor, cu_segments: torch.Tensor, adapters: torch.Tensor) -> torch.Tensor:
    """x of each segment times its adapter's A.

    Args:
        x: [T, K]; a: [adapters, rank, K] of x's dtype.
        cu_segments: [S + 1] int32, rows of segment s are cu_segments[s] … cu_segments[s + 1].
        adapters: [S] int32; -1 for none.

    Returns:
        [T, rank] float32; rows of no adapter are undefined.
    """
    out = torch.empty(x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
    _launch(x, a, out, cu_segments, adapters, None)
    return out


def lora_expand(
    h: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor,
    cu_segments: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    """Add scales[adapter] * h B^T to y, in place.

    Args:
        h: [T, rank] float32, of `lora_shrink`; b: [adapters, N, rank]; y: [T, N], its last dimension contiguous.
        scales: [adapters] float32.
        cu_segments, adapters: as in `lora_shrink`.
    """
    _launch(h, b, y, cu_segments, adapters, scales)


def lora_shrink_reference(
    x: torch.Tensor, a: torch.Tensor, cu_segments: torch.Tensor, adapters: torch.Tensor
) -> torch.Tensor:
    """The twin of `lora_shrink`; rows of no adapter are zero."""
    out = torch.zeros(x.shape[0], a.shape[1], dtype=torch.float32, device=x.device)
    bounds = cu_segments.tolist()
    for segment, adapter in enumerate(adapters.tolist()):
        rows = slice(bounds[segment], bounds[segment + 1])
        if adapter >= 0:
            out[rows] = x[rows].float() @ a[adapter].float().T
    return out


def lora_expand_reference(
    h: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor,
    cu_segments: torch.Tensor,
    adapters: torch.Tensor,
) -> None:
    """The twin of `lora_expand`."""
    bounds = cu_segments.tolist()
    for segment, adapter in enumerate(adapters.tolist()):
        rows = slice(bounds[segment], bounds[segment + 1])
        if adapter >= 0:
            y[rows] = (y[rows].float() + scales[adapter] * (h[rows] @ b[adapter].float().T)).to(y.dtype)
