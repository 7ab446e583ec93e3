"""Gated activations over a merged gate-up product: act(gate) * up.

x    [R, 2N]    | gate (N) | up (N) |   ->   [R, N]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from .tiles import last_dim_dense, power_of_two, tanh


@triton.jit
def _gated_kernel(
    x: tl.tensor, out: tl.tensor, x_stride: int, DIM: tl.constexpr, COLUMNS: tl.constexpr, GELU: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < DIM
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + DIM + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        activated = 0.5 * gate * (1.0 + tanh(inner))
    else:
        activated = gate / (1.0 + tl.exp(-tl.maximum(gate, -80.0)))  # exp must not overflow
    dtype = out.dtype.element_ty
    # The activation is rounded before the product, as where it is an operation of its own.
    tl.store(out + row * DIM + column, (activated.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def _launch(x: torch.Tensor, gelu: bool) -> torch.Tensor:
    dim = x.shape[-1] // 2
    rows = last_dim_dense(x.reshape(-1, 2 * dim))
    out = torch.empty(*x.shape[:-1], dim, dtype=x.dtype, device=x.device)
    columns = min(power_of_two(dim), 1024)
    _gated_kernel[(rows.shape[0], -(-dim // columns))](rows, out, rows.stride(0), DIM=dim, COLUMNS=columns, GELU=gelu)
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(x[..., :N]) * x[..., N:]. x: [..., 2N]; returns [..., N] of x's dtype."""
    return _launch(x, gelu=False)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(x[..., :N]) * x[..., N:] with gelu's tanh approximation. x: [..., 2N]; returns [..., N] of x's dtype."""
    return _launch(x, gelu=True)


def silu_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The twin of `silu_and_mul`."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu_tanh_and_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """The twin of `gelu_tanh_and_mul`."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up
