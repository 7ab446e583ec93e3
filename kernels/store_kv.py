"""Writes a step's keys and values into the paged pool.

slot_mapping   [T]      -1 (padding: nothing is written)   35   36   …      slot = block * block_size + offset
pool           [num_blocks, Hk, block_size, D]                              at (slot // block_size, head, slot % …)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import last_dim_dense, power_of_two


@triton.jit
def _store_kernel(
    source: tl.tensor,
    pool: tl.tensor,
    slot_mapping: tl.tensor,
    source_stride_token: int,
    source_stride_head: int,
    pool_stride_block: int,
    pool_stride_head: int,
    pool_stride_token: int,
    block_size: int,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, PADDED_HEADS)[:, None]
    dim = tl.arange(0, PADDED_DIM)[None, :]
    inside = (head < HEADS) & (dim < DIM)
    row = tl.load(source + token * source_stride_token + head * source_stride_head + dim, mask=inside)
    place = slot // block_size * pool_stride_block + slot % block_size * pool_stride_token
    tl.store(pool + place + head * pool_stride_head + dim, row.to(pool.dtype.element_ty), mask=inside)


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write K/V in place.

    Args:
        keys: [T, Hk, D]; values: [T, Hk, Dv]; the strides of T and Hk are free.
        key_pool: [num_blocks, Hk, block_size, D]; value_pool: [num_blocks, Hk, block_size, Dv].
        slot_mapping: [T] int64, where each token goes; -1: nowhere.
    """
    for source, pool in ((last_dim_dense(keys), key_pool), (last_dim_dense(values), value_pool)):
        assert pool.stride(-1) == 1, "a head's vector is contiguous in the pool"
        num_tokens, heads, dim = source.shape
        _store_kernel[(num_tokens,)](
            source,
            pool,
            slot_mapping,
            *source.stride()[:2],
            *pool.stride()[:3],
            pool.shape[2],
            HEADS=heads,
            DIM=dim,
            PADDED_HEADS=power_of_two(heads),
            PADDED_DIM=power_of_two(dim),
        )


def store_kv_reference(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The twin of `store_kv`."""
    slots = slot_mapping[slot_mapping >= 0]
    block, offset = slots // key_pool.shape[2], slots % key_pool.shape[2]
    for source, pool in ((keys, key_pool), (values, value_pool)):
        pool[block, :, offset] = source[slot_mapping >= 0].to(pool.dtype)
