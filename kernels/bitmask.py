"""Bans what a grammar does not allow.

bitmask   [M, ceil(V / 32)] int32      token t of a row is allowed where bit t % 32 of word t // 32 is set
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import power_of_two


@triton.jit
def _bitmask_kernel(
    logits: tl.tensor,
    bitmask: tl.tensor,
    rows: tl.tensor,
    logits_stride: int,
    bitmask_stride: int,
    size: int,
    TILE: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    if row < 0:
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word = tl.load(bitmask + number * bitmask_stride + token // 32, mask=token < size, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=banned & (token < size))


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits of banned tokens to -inf, in place.

    Args:
        logits: [R, V], the vocabulary contiguous.
        bitmask: [M, ceil(V / 32)] int32.
        rows: [M] int64, the row that each mask is for; -1 for none.
    """
    assert logits.stride(-1) == 1, "logits are changed in place, a row at a time"
    tile = min(power_of_two(logits.shape[1]), 2048)
    _bitmask_kernel[(len(rows), -(-logits.shape[1] // tile))](
        logits, bitmask, rows, logits.stride(0), bitmask.stride(0), logits.shape[1], TILE=tile
    )


def apply_bitmask_reference(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """The twin of `apply_bitmask`."""
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    banned = bits.flatten(1)[:, : logits.shape[1]] == 0
    used = rows >= 0
    logits[rows[used]] = logits[rows[used]].masked_fill(banned[used], -torch.inf)
