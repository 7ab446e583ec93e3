"""RMSNorm, alone or after adding the residual: one pass over memory instead of six.

Two conventions of rounding, as the models have them: Llama's norm rounds x / rms to x's type before the weight is
multiplied, Gemma's stays in float32 and multiplies 1 + weight (`unit_offset`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import last_dim_dense, power_of_two


@triton.jit
def normalized(x: tl.tensor, weight: tl.tensor, epsilon: float, dim: int, dtype: tl.dtype, UNIT_OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """A float32 row over its root mean square, times a float32 weight; `dtype` is what Llama's norm rounds to."""
    scaled = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / dim + epsilon))
    if UNIT_OFFSET:
        return scaled * (1.0 + weight)
    return scaled.to(dtype).to(tl.float32) * weight


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: int,
    residual_stride: int,
    epsilon: float,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ADD: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < DIM
    value = tl.load(x + row * x_stride + dim, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if ADD:
        value += tl.load(residual + row * residual_stride + dim, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the sum as it is stored: rounded.
        rounded = value.to(dtype)
        tl.store(total + row * DIM + dim, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.load(weight + dim, mask=inside, other=0.0).to(tl.float32)
    result = normalized(value, factor, epsilon, DIM, dtype, UNIT_OFFSET)
    tl.store(out + row * DIM + dim, result.to(dtype), mask=inside)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, unit_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dim = x.shape[-1]
    rows = last_dim_dense(x.reshape(-1, dim))
    others = rows if residual is None else last_dim_dense(residual.reshape(-1, dim))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    padded = power_of_two(dim)
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        others,
        weight,
        out,
        total,
        rows.stride(0),
        others.stride(0),
        epsilon,
        DIM=dim,
        PADDED_DIM=padded,
        ADD=residual is not None,
        UNIT_OFFSET=unit_offset,
        num_warps=min(max(padded // 256, 1), 16),
    )
    return out, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, unit_offset: bool = False) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension.

    Args:
        x: [..., N] with rows at one stride.
        weight: [N].
        unit_offset: multiply 1 + weight instead, in float32.

    Returns:
        A dense tensor like x.
    """
    return _launch(x, None, weight, epsilon, unit_offset)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of x + residual, and that sum, which is the next residual; both like x. Else as `rms_norm`."""
    return _launch(x, residual, weight, epsilon, unit_offset)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """The twin of `rms_norm`."""
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (scaled * (1.0 + weight.float())).to(x.dtype) if unit_offset else scaled.to(x.dtype) * weight.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, *, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `add_rms_norm`."""
    total = x + residual
    return rms_norm_reference(total, weight, epsilon, unit_offset=unit_offset), total
