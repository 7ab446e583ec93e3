"""Rotary positions of queries and keys, as `heads` draws them, in one launch.

    rope               queries and keys turn
    norm_rope_store    they are normed before, and keys and values written into the pool behind it

A program takes some heads of one token: tiles of queries, then of keys, then, with a pool, of values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .heads import HeadNorm, turned
from .rms_norm import rms_norm_reference
from .store_kv import store_kv_reference
from .tiles import last_dim_dense, power_of_two


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
    TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_OFFSET: tl.constexpr,
    K_OFFSET: tl.constexpr,
    PAGED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    cos += token * ROTARY_DIM
    sin += token * ROTARY_DIM
    Q_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    if tile < Q_TILES:
        head = (tile * TILE + tl.arange(0, TILE))[:, None]
        inside = (head < HEADS) & (dim < DIM)
        at = q + token * q_stride_token + head * q_stride_head
        result = turned(
            at, inside, cos, sin, q_weight, q_epsilon, DIM, PADDED_DIM, ROTARY_DIM, INTERLEAVED, Q_NORM, Q_OFFSET
        )
        tl.store(q_out + (token * HEADS + head) * DIM + dim, result.to(q_out.dtype.element_ty), mask=inside)
        return

    head = ((tile - Q_TILES) % KV_TILES * TILE + tl.arange(0, TILE))[:, None]
    block = tl.full([], 0, tl.int64)
    offset = token
    if PAGED:  # slot = block * block_size + offset; -1: nowhere
        slot = tl.load(slot_mapping + token)
        if slot < 0:
            return
        block = slot // block_size
        offset = slot % block_size
    if tile < Q_TILES + KV_TILES:
        inside = (head < KV_HEADS) & (dim < DIM)
        at = k + token * k_stride_token + head * k_stride_head
        result = turned(
            at, inside, cos, sin, k_weight, k_epsilon, DIM, PADDED_DIM, ROTARY_DIM, INTERLEAVED, K_NORM, K_OFFSET
        )
        place = block * k_out_stride_block + offset * k_out_stride_token + head * k_out_stride_head
        tl.store(k_out + place + dim, result.to(k_out.dtype.element_ty), mask=inside)
    else:
        inside = (head < KV_HEADS) & (dim < VALUE_DIM)
        value = tl.load(v + token * v_stride_token + head * v_stride_head + dim, mask=inside)
        place = block * v_out_stride_block + offset * v_out_stride_token + head * v_out_stride_head
        tl.store(v_out + place + dim, value.to(v_out.dtype.element_ty), mask=inside)


def _launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    k_out: torch.Tensor,
    v_out: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    interleaved: bool,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> torch.Tensor:
    q, k, v = last_dim_dense(q), last_dim_dense(k), last_dim_dense(v)
    cos, sin = angles[0].contiguous(), angles[1].contiguous()
    num_tokens, heads, dim = q.shape
    kv_heads, value_dim = k.shape[1], v.shape[2]
    paged = slot_mapping is not None
    q_out = torch.empty(num_tokens, heads, dim, dtype=q.dtype, device=q.device)
    # Without a pool there is one block, of all tokens.
    strides = [*k_out.stride()[:3], *v_out.stride()[:3]] if paged else [0, k_out.stride(1), k_out.stride(0), 0, 0, 0]
    padded = power_of_two(max(dim, value_dim))
    tile = max(min(power_of_two(max(heads, kv_heads)), 2048 // padded), 1)
    tiles = -(-heads // tile) + -(-kv_heads // tile) * (2 if paged else 1)
    _rope_kernel[(num_tokens, tiles)](
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
        *strides,
        k_out.shape[2],
        q_norm.epsilon if q_norm else 0.0,
        k_norm.epsilon if k_norm else 0.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        ROTARY_DIM=cos.shape[-1],
        PADDED_DIM=padded,
        TILE=tile,
        INTERLEAVED=interleaved,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        Q_OFFSET=q_norm is not None and q_norm.unit_offset,
        K_OFFSET=k_norm is not None and k_norm.unit_offset,
        PAGED=paged,
        num_warps=4,
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
    return _launch(q, k, k, (cos, sin), k_out, k_out, None, interleaved, None, None), k_out


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
    return _launch(q, k, v, (cos, sin), key_pool, value_pool, slot_mapping, interleaved, q_norm, k_norm)


def _turned_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
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
    return _turned_reference(q, cos, sin, interleaved), _turned_reference(k, cos, sin, interleaved)


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
