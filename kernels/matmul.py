"""A linear layer whose rows do not depend on how many there are: y = x W^T + bias, batch-invariant to the bit.

    y[m, n] = ((p0 + p1) + p2) + … + bias[n]        p_s: products of stretch s of K, summed from its first on

    K     |------ stretch 0 ------|------ stretch 1 ------|---…      STRETCH inputs; in tiles of INNER
    few rows     a program to each stretch of a tile of outputs, so that enough of them read the weights; then they are
                 added up by another kernel
    many rows    a program to a tile of outputs, one stretch after the other

Either way the same numbers are added in the same order. A tile has ROWS rows and COLUMNS outputs whatever there is to
do, since the instruction that multiplies, and how it rounds, follow from the tile: with one row it computes 63 for
nothing, which on a GPU hides behind reading the weights.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .tiles import last_dim_dense

ROWS = 64
COLUMNS = 64
STRETCH = 512


@triton.jit
def _linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    SIZE_IN: tl.constexpr,
    SIZE_OUT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    TILE_STRETCH: tl.constexpr,
    SPREAD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_row, is_column = row < num_rows, column < SIZE_OUT
    first, last = 0, SIZE_IN
    if SPREAD:
        first = tl.program_id(2) * TILE_STRETCH
        last = tl.minimum(first + TILE_STRETCH, SIZE_IN)
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for begin in range(first, last, TILE_STRETCH):
        part = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for start in range(begin, tl.minimum(begin + TILE_STRETCH, SIZE_IN), TILE_INNER):
            inner = start + tl.arange(0, TILE_INNER)
            is_inner = (inner < SIZE_IN)[None, :]
            values = tl.load(x + row[:, None] * x_stride + inner[None, :], mask=is_row[:, None] & is_inner, other=0.0)
            w_at = weight + column[:, None] * weight_stride + inner[None, :]
            factors = tl.load(w_at, mask=is_column[:, None] & is_inner, other=0.0)
            part = tl.dot(values, tl.trans(factors), part, input_precision="ieee")
        total += part
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = row
    if SPREAD:
        place += tl.program_id(2).to(tl.int64) * num_rows
    at = out + place[:, None] * SIZE_OUT + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _add_stretches_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: int,
    SIZE_OUT: tl.constexpr,
    STRETCHES: tl.constexpr,
    TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < SIZE_OUT
    total = tl.zeros([TILE], tl.float32)
    for stretch in range(STRETCHES):
        total += tl.load(parts + (stretch * num_rows + row) * SIZE_OUT + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE_OUT + column, total.to(out.dtype.element_ty), mask=inside)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, spread: bool | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, summed in float32.

    Args:
        x: [..., K] with rows at one stride; weight: [N, K] of x's dtype, rows at any stride; bias: [N].
        spread: give each stretch of K a program of its own; None: where there would be too few programs otherwise.
            It changes the time, and no bit of the result.

    Returns:
        [..., N] of x's dtype, dense.
    """
    size_out, size_in = weight.shape
    rows, weight = last_dim_dense(x.reshape(-1, size_in)), last_dim_dense(weight)
    num_rows, stretches = rows.shape[0], -(-size_in // STRETCH)
    out = torch.empty(*x.shape[:-1], size_out, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles = -(-num_rows // ROWS), -(-size_out // COLUMNS)
    if spread is None:
        spread = 2 * row_tiles * column_tiles <= _processors(x.device)
    spread = spread and stretches > 1
    parts = torch.empty(stretches, num_rows, size_out, dtype=torch.float32, device=x.device) if spread else out
    factors = weight if bias is None else bias
    _linear_kernel[(row_tiles, column_tiles, stretches if spread else 1)](
        rows,
        weight,
        factors,
        parts,
        num_rows,
        rows.stride(0),
        weight.stride(0),
        SIZE_IN=size_in,
        SIZE_OUT=size_out,
        TILE_ROWS=ROWS,
        TILE_COLUMNS=COLUMNS,
        TILE_INNER=128 // x.dtype.itemsize,
        TILE_STRETCH=STRETCH,
        SPREAD=spread,
        HAS_BIAS=bias is not None and not spread,
        num_warps=4,
        num_stages=3,
    )
    if spread:
        tile = 256
        _add_stretches_kernel[(num_rows, -(-size_out // tile))](
            parts,
            factors,
            out,
            num_rows,
            SIZE_OUT=size_out,
            STRETCHES=stretches,
            TILE=tile,
            HAS_BIAS=bias is not None,
        )
    return out


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, spread: bool | None = None
) -> torch.Tensor:
    """The twin of `linear`."""
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float32, device=x.device)
    for begin in range(0, weight.shape[1], STRETCH):
        stretch = slice(begin, begin + STRETCH)
        total += x[..., stretch].float() @ weight[:, stretch].float().T
    return (total if bias is None else total + bias.float()).to(x.dtype)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
