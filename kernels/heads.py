"""What is done to a head before attention: its norm, where the model has one, and its rotation.

neox          (x[i], x[i + R/2]) turn by angle i         angles stand in cos/sin[:, i] and [:, i + R/2]
interleaved   (x[2i], x[2i + 1]) turn by angle i         angles stand in cos/sin[:, 2i] and [:, 2i + 1]
x             |<---- R rotates ---->|<- the rest stays ->|        R = cos.shape[-1] <= D
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head before it turns: `weight` [D], as in `rms_norm`."""

    weight: torch.Tensor
    epsilon: float
    unit_offset: bool = False


@triton.jit
def _weighted(x: tl.tensor, weight: tl.tensor, dtype: tl.dtype, UNIT_OFFSET: tl.constexpr) -> tl.tensor:
    """Normed heads times the norm's weight, rounded where the model's own norm rounds."""
    if UNIT_OFFSET:
        return (x * (1.0 + weight)).to(dtype).to(tl.float32)
    return (x.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def turned(
    at: tl.tensor,
    inside: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    epsilon: float,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> tl.tensor:
    """The heads at `at` [heads, 1], normed and turned, [heads, PADDED_DIM] float32."""
    dim = tl.arange(0, PADDED_DIM)
    # The element that `dim` turns with, and which side of the pair `dim` is.
    if INTERLEAVED:
        partner = dim ^ 1
        is_first = dim % 2 == 0
    else:
        is_first = dim < ROTARY_DIM // 2
        partner = tl.where(is_first, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)
    turns = dim < ROTARY_DIM
    partner = tl.where(turns, partner, dim)
    cosine = tl.load(cos + dim, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + dim, mask=turns, other=0.0).to(tl.float32)
    x = tl.load(at + dim[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        dtype = at.dtype.element_ty
        scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / DIM + epsilon))[:, None]
        factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        other_factor = tl.load(weight + partner, mask=dim < DIM, other=0.0).to(tl.float32)
        x = _weighted(x * scale, factor[None, :], dtype, UNIT_OFFSET)
        other = _weighted(other * scale, other_factor[None, :], dtype, UNIT_OFFSET)
    return x * cosine[None, :] + other * tl.where(is_first, -sine, sine)[None, :]
