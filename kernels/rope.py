"""Rotary positions of queries and keys; with their norms before and the keys' and values' way into the pool behind it,
all in one launch.

    neox          (x[i], x[i + R/2]) turn by angle i         angles stand in cos/sin[:, i] and [:, i + R/2]
    interleaved   (x[2i], x[2i + 1]) turn by angle i         angles stand in cos/sin[:, 2i] and [:, 2i + 1]
    x             |<---- R rotates ---->|<- the rest stays ->|        R = cos.shape[-1] <= D

A program turns one head of one token. With a pool there are Hk programs more a token, which carry the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .rms_norm import rms_norm_reference
from .store_kv import store_kv_reference
from .tiles import last_dim_dense, power_of_two


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each head before it turns: `weight` [D], as in `rms_norm`."""

    weight: torch.Tensor
    epsilon: float
    unit_offset: bool = False


@triton.jit
def _load_head(
    at: tl.tensor,
    dim: tl.tensor,
    weight: tl.tensor,
    epsilon: float,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
) -> tl.tensor:
    """Elements `dim` of the head at `at`, normed over all of it."""
    x = tl.load(at + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    if NORM:
        whole = tl.arange(0, PADDED_DIM)
        full = tl.load(at + whole, mask=whole < DIM, other=0.0).to(tl.float32)
        x = x * (1.0 / tl.sqrt(tl.sum(full * full, 0) / DIM + epsilon))
        factor = tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        dtype = at.dtype.element_ty
        # Rounded where the model's own norm rounds.
        if UNIT_OFFSET:
            x = (x * (1.0 + factor)).to(dtype).to(tl.float32)
        else:
            x = (x.to(dtype).to(tl.float32) * factor).to(dtype).to(tl.float32)
    return x


@triton.jit
def _rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    slot_mapping: tl.tensor,
    q_stride_token: int,
    q_stride_head: int,
    k_stride_token: int,
    k_stride_head: int,
    v_stride_token: int,
    v_stride_head: int,
    k_out_stride_block: int,
    k_out_stride_head: int,
    k_out_stride_token: int,
    v_out_stride_block: int,
    v_out_stride_head: int,
    v_out_stride_token: int,
    block_size: int,
    q_epsilon: float,
    k_epsilon: float,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_OFFSET: tl.constexpr,
    K_OFFSET: tl.constexpr,
    PAGED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
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

    if PAGED:  # keys and values go to their slot, block * block_size + offset
        slot = tl.load(slot_mapping + token)
        k_place = slot // block_size * k_out_stride_block + slot % block_size * k_out_stride_token
        v_place = slot // block_size * v_out_stride_block + slot % block_size * v_out_stride_token
        if (head >= HEADS) & (slot < 0):
            return
        if head >= HEADS + KV_HEADS:
            kv_head = head - HEADS - KV_HEADS
            value_dim = tl.arange(0, PADDED_DIM)
            value = tl.load(
                v + token * v_stride_token + kv_head * v_stride_head + value_dim, mask=value_dim < VALUE_DIM
            )
            at = v_out + v_place + kv_head * v_out_stride_head + value_dim
            tl.store(at, value.to(v_out.dtype.element_ty), mask=value_dim < VALUE_DIM)
            return
    else:
        k_place = token * k_out_stride_token

    cosine = tl.load(cos + token * ROTARY_DIM + dim, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + token * ROTARY_DIM + dim, mask=turns, other=0.0).to(tl.float32)
    sine = tl.where(is_first, -sine, sine)
    if head < HEADS:
        at = q + token * q_stride_token + head * q_stride_head
        x = _load_head(at, dim, q_weight, q_epsilon, DIM, PADDED_DIM, Q_NORM, Q_OFFSET)
        other = _load_head(at, partner, q_weight, q_epsilon, DIM, PADDED_DIM, Q_NORM, Q_OFFSET)
        q_at = q_out + (token * HEADS + head) * DIM + dim
        tl.store(q_at, (x * cosine + other * sine).to(q_out.dtype.element_ty), mask=dim < DIM)
    else:
        kv_head = head - HEADS
        at = k + token * k_stride_token + kv_head * k_stride_head
        x = _load_head(at, dim, k_weight, k_epsilon, DIM, PADDED_DIM, K_NORM, K_OFFSET)
        other = _load_head(at, partner, k_weight, k_epsilon, DIM, PADDED_DIM, K_NORM, K_OFFSET)
        k_at = k_out + k_place + kv_head * k_out_stride_head + dim
        tl.store(k_at, (x * cosine + other * sine).to(k_out.dtype.element_ty), mask=dim < DIM)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> torch.Tensor:
    q, k, v, cos, sin = last_dim_dense(q), last_dim_dense(k), last_dim_dense(v), cos.contiguous(), sin.contiguous()
    num_tokens, heads, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[2]
    paged = slot_mapping is not None
    q_out = torch.empty(num_tokens, heads, dim, dtype=q.dtype, device=q.device)
    strides = [k_out.stride()[:3], v_out.stride()[:3]] if paged else [(0, k_out.stride(1), k_out.stride(0)), (0, 0, 0)]
    _rope_kernel[(num_tokens, heads + kv_heads * (2 if paged else 1))](
        q,
        k,
        v,
        cos,
        sin,
        q if q_norm is None else q_norm.weight,
        k if k_norm is None else k_norm.weight,
        q_out,
        k_out,
        v_out,
        cos if slot_mapping is None else slot_mapping,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *strides[0],
        *strides[1],
        k_out.shape[2],
        q_norm.epsilon if q_norm else 0.0,
        k_norm.epsilon if k_norm else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        ROTARY_DIM=cos.shape[-1],
        PADDED_DIM=power_of_two(max(dim, value_dim)),
        INTERLEAVED=interleaved,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        Q_OFFSET=q_norm is not None and q_norm.unit_offset,
        K_OFFSET=k_norm is not None and k_norm.unit_offset,
        PAGED=paged,
        num_warps=1,
    )
    return q_out


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn queries and keys by their positions' angles.

    Args:
        q: [T, H, D]; k: [T, Hk, D]; the strides of T and heads are free.
        cos, sin: [T, R], each angle twice, in the order that `interleaved` or not has.

    Returns:
        q and k turned, dense.
    """
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _launch(q, k, k, cos, sin, k_out, k_out, None, interleaved, None, None), k_out


def norm_rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
) -> torch.Tensor:
    """Norm queries and keys where there are norms, turn them, and write keys and values into the pool.

    Args:
        q, k, cos, sin, interleaved: as in `rope`; v: [T, Hk, Dv].
        key_pool, value_pool, slot_mapping: as in `store_kv`.

    Returns:
        q [T, H, D], dense.
    """
    return _launch(q, k, v, cos, sin, key_pool, value_pool, slot_mapping, interleaved, q_norm, k_norm)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    size = cos.shape[-1]
    head, rest = x[..., :size].float(), x[..., size:]
    if interleaved:
        turned = torch.stack([-head[..., 1::2], head[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-head[..., size // 2 :], head[..., : size // 2]], -1)
    return torch.cat([(head * cos.float()[:, None] + turned * sin.float()[:, None]).to(x.dtype), rest], -1)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `rope`."""
    return _turned(q, cos, sin, interleaved), _turned(k, cos, sin, interleaved)


def norm_rope_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
) -> torch.Tensor:
    """The twin of `norm_rope_store`."""
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm.weight, q_norm.epsilon, unit_offset=q_norm.unit_offset)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm.weight, k_norm.epsilon, unit_offset=k_norm.unit_offset)
    q, k = rope_reference(q, k, cos, sin, interleaved=interleaved)
    store_kv_reference(k, v, key_pool, value_pool, slot_mapping)
    return q
