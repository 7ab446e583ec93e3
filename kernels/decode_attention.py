"""Attention of one new token a sequence over its paged K/V, the keys split among programs (flash-decoding).

A program takes (sequence, KV head, split): its query heads are the rows of one product. Where splits lie, and how their
results become one: `splits.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .extend_attention import extend_attention_reference
from .splits import first_key, merge_splits, split_length
from .tiles import (
    LEAST_DOT,
    LOG2_E,
    attention_tile,
    last_dim_dense,
    load_paged,
    log2_scores,
    power_of_two,
    softmax_step,
)

SPLIT_SIZE = 256  # keys; below this a program has too little to do


@triton.jit
def _decode_kernel(
    q: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    kv_lens: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_heads: int,
    q_stride_sequence: int,
    q_stride_head: int,
    key_stride_block: int,
    key_stride_head: int,
    key_stride_token: int,
    value_stride_block: int,
    value_stride_head: int,
    value_stride_token: int,
    table_stride: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    kv_len = tl.load(kv_lens + sequence)
    start = first_key(kv_len, window, WINDOWED, KEYS)
    length = split_length(kv_len - start, NUM_SPLITS, SPLIT_KEYS)
    first = start + split * length
    last = tl.minimum(first + length, kv_len)
    # A sequence without keys (a padding row) still writes its zeros, in split 0.
    if (first >= last) & (split > 0):
        return

    row = tl.program_id(1) % HEAD_TILES * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP
    head = kv_head * GROUP + row
    key_dim = tl.arange(0, PADDED_KEY_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    k_head = key_pool + kv_head * key_stride_head
    v_head = value_pool + kv_head * value_stride_head
    q_at = q + sequence.to(tl.int64) * q_stride_sequence + head[:, None] * q_stride_head + key_dim[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # one more score without a value; it must count once, so split 0 takes it
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    result = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)

    for tile in range(first, last, KEYS):
        key = tile + tl.arange(0, KEYS)
        seen = key < last
        if WINDOWED:
            seen = seen & (key >= kv_len - window)
        block = tl.load(block_tables + sequence * table_stride + key // block_size, mask=seen, other=0).to(tl.int64)
        offset = key % block_size
        keys = load_paged(k_head, block, offset, key_stride_block, key_stride_token, seen, KEY_DIM, PADDED_KEY_DIM)
        scores = log2_scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, decay, best = softmax_step(scores, best)
        values = load_paged(
            v_head, block, offset, value_stride_block, value_stride_token, seen, VALUE_DIM, PADDED_VALUE_DIM
        )
        result = result * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)

    total = tl.where(total == 0.0, 1.0, total)
    result = result / total[:, None]
    place = (sequence.to(tl.int64) * num_heads + head) * NUM_SPLITS + split
    out_at = out + place[:, None] * VALUE_DIM + value_dim[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :])
    if NUM_SPLITS > 1:
        tl.store(lse + place, best + tl.log2(total), mask=is_row)


def decode_attention(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 8,
    split_size: int = SPLIT_SIZE,
) -> torch.Tensor:
    """Attention of each sequence's newest token over its paged K/V.

    Args:
        q: [S, H, D]; the strides of S and H are free.
        key_pool: [num_blocks, Hk, block_size, D] of q's dtype; value_pool: [num_blocks, Hk, block_size, Dv].
        block_tables: [S, W] int32, the blocks of each sequence in the order of its tokens.
        kv_lens: [S] int32, tokens of each sequence in the pool, the newest included; 0 gives zeros.
        scale, window, softcap, sinks: as in `extend_attention`.
        num_splits: at most so many programs share a sequence's keys.
        split_size: keys that a program takes at least; a multiple of 64.

    Returns:
        [S, H, Dv] of q's dtype.
    """
    assert split_size % 64 == 0, "a split is made of whole tiles"
    q, key_pool, value_pool = last_dim_dense(q), last_dim_dense(key_pool), last_dim_dense(value_pool)
    num_sequences, heads, key_dim = q.shape
    _, kv_heads, block_size, value_dim = value_pool.shape
    group = heads // kv_heads
    rows = min(power_of_two(group, least=LEAST_DOT), 64)
    head_tiles = -(-group // rows)
    tile = attention_tile(max(key_dim, value_dim), q.dtype)
    out = torch.empty(num_sequences, heads, value_dim, dtype=q.dtype, device=q.device)
    partial, lse = out, out
    if num_splits > 1:
        lse = torch.empty(num_sequences, heads, num_splits, dtype=torch.float32, device=q.device)
        partial = torch.empty(*lse.shape, value_dim, dtype=torch.float32, device=q.device)
    _decode_kernel[(num_sequences, kv_heads * head_tiles, num_splits)](
        q,
        key_pool,
        value_pool,
        block_tables,
        kv_lens,
        q if sinks is None else sinks,
        partial,
        lse,
        heads,
        *q.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        block_tables.stride(0),
        block_size,
        window or 0,
        scale,
        softcap or 0.0,
        GROUP=group,
        HEAD_TILES=head_tiles,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        KEYS=tile,
        PADDED_KEY_DIM=power_of_two(key_dim, least=LEAST_DOT),
        PADDED_VALUE_DIM=power_of_two(value_dim, least=LEAST_DOT),
        NUM_SPLITS=num_splits,
        SPLIT_KEYS=split_size,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        merge_splits(partial, lse, kv_lens, out, window=window, key_tile=tile, split_size=split_size)
    return out


def decode_attention_reference(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int = 8,
    split_size: int = SPLIT_SIZE,
) -> torch.Tensor:
    """The twin of `decode_attention`; the splits change nothing but the order of sums."""
    bounds = torch.arange(len(kv_lens) + 1, dtype=torch.int32)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    return extend_attention_reference(q, key_pool, value_pool, block_tables, kv_lens, bounds, **options)  # type: ignore[arg-type]
