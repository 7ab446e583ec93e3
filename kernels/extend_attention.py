"""Attention of many new tokens a sequence over all that its blocks hold, the new tokens' own K/V among them.

One kernel for whole prompts, chunks of prompts, verified drafts and single tokens. A tile of rows packs the query heads
of one KV head, so that K/V are read once for all of them; tiles of keys begin at multiples of their size, whatever was
cached or chunked, so that a row's sum runs in the same order however its prompt was cut.

    rows of a tile   (token 0, head 0) (token 0, head 1) … (token 0, head G-1) (token 1, head 0) …      G = H / Hk

    keys        0         first                      position p of a row            kv_len
                |---------|----tile----|----tile----|--x.................------------|
                          window's begin, rounded down  └ seen up to here (causal), from p - window + 1
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import (
    LEAST_DOT,
    LOG2_E,
    attention_tile,
    find_segment,
    last_dim_dense,
    load_paged,
    log2_scores,
    power_of_two,
    softmax_step,
)


@triton.jit
def _extend_kernel(
    q: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    block_tables: tl.tensor,
    kv_lens: tl.tensor,
    cu_seqlens_q: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_sequences: int,
    q_stride_token: int,
    q_stride_head: int,
    key_stride_block: int,
    key_stride_head: int,
    key_stride_token: int,
    value_stride_block: int,
    value_stride_head: int,
    value_stride_token: int,
    table_stride: int,
    out_stride_token: int,
    out_stride_head: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = find_segment(tile, cu_seqlens_q, num_sequences, TOKENS)
    begin = tl.load(cu_seqlens_q + sequence)
    length = tl.load(cu_seqlens_q + sequence + 1) - begin
    first_token = (tile - begin // TOKENS - sequence) * TOKENS
    if first_token >= length:
        return
    kv_len = tl.load(kv_lens + sequence)

    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < TOKENS * GROUP) & (token < length)
    position = kv_len - length + token
    key_dim = tl.arange(0, PADDED_KEY_DIM)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    k_head = key_pool + kv_head * key_stride_head
    v_head = value_pool + kv_head * value_stride_head
    place = (begin + token).to(tl.int64)
    q_at = q + place[:, None] * q_stride_token + head[:, None] * q_stride_head + key_dim[None, :]
    queries = tl.load(q_at, mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :], other=0.0)

    # A sink is one more score without a value: it stands in maximum and sum from the start.
    if HAS_SINKS:
        best = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED_VALUE_DIM], tl.float32)

    last = tl.minimum(kv_len, kv_len - length + first_token + TOKENS)
    first = 0
    if WINDOWED:
        first = tl.maximum(kv_len - length + first_token - window + 1, 0) // KEYS * KEYS
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < kv_len
        block = tl.load(block_tables + sequence * table_stride + key // block_size, mask=is_key, other=0).to(tl.int64)
        offset = key % block_size
        keys = load_paged(k_head, block, offset, key_stride_block, key_stride_token, is_key, KEY_DIM, PADDED_KEY_DIM)
        scores = log2_scores(tl.dot(queries, tl.trans(keys), input_precision="ieee"), scale, softcap, CAPPED)
        seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        weights, decay, best = softmax_step(scores, best)
        values = load_paged(
            v_head, block, offset, value_stride_block, value_stride_token, is_key, VALUE_DIM, PADDED_VALUE_DIM
        )
        result = result * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)

    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out + place[:, None] * out_stride_token + head[:, None] * out_stride_head + value_dim[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :])


def extend_attention(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last rows over its paged K/V.

    Args:
        q: [T, H, D], the rows of all sequences one after the other; the strides of T and H are free.
        key_pool: [num_blocks, Hk, block_size, D] of q's dtype; value_pool: [num_blocks, Hk, block_size, Dv].
        block_tables: [S, W] int32, the blocks of each sequence in the order of its tokens.
        kv_lens: [S] int32, tokens of each sequence in the pool, those of its rows included.
        cu_seqlens_q: [S + 1] int32: rows cu_seqlens_q[s] … cu_seqlens_q[s + 1] are the last tokens of sequence s.
        scale: factor of the scores.
        window: tokens that a row sees, itself among them; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: [H], a score per head that takes weight and gives nothing.

    Returns:
        [T, H, Dv] of q's dtype.
    """
    q, key_pool, value_pool = last_dim_dense(q), last_dim_dense(key_pool), last_dim_dense(value_pool)
    num_tokens, heads, key_dim = q.shape
    _, kv_heads, block_size, value_dim = value_pool.shape
    num_sequences, group = len(kv_lens), heads // kv_heads
    out = torch.empty(num_tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    tile = attention_tile(max(key_dim, value_dim), q.dtype)
    rows = power_of_two(group, least=tile)
    tokens = rows // group
    _extend_kernel[(num_tokens // tokens + num_sequences, kv_heads)](
        q,
        key_pool,
        value_pool,
        block_tables,
        kv_lens,
        cu_seqlens_q,
        q if sinks is None else sinks,
        out,
        num_sequences,
        *q.stride()[:2],
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        block_tables.stride(0),
        *out.stride()[:2],
        block_size,
        window or 0,
        scale,
        softcap or 0.0,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        TOKENS=tokens,
        KEYS=tile,
        PADDED_KEY_DIM=power_of_two(key_dim, least=LEAST_DOT),
        PADDED_VALUE_DIM=power_of_two(value_dim, least=LEAST_DOT),
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=4,
        num_stages=2,
    )
    return out


def extend_attention_reference(
    q: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_tables: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `extend_attention`, in float32, a sequence at a time."""
    outputs = []
    bounds = cu_seqlens_q.tolist()
    for number, kv_len in enumerate(kv_lens.tolist()):
        rows = q[bounds[number] : bounds[number + 1]].float().transpose(0, 1)
        blocks = block_tables[number].long()
        keys, values = (
            pool[blocks]
            .float()
            .transpose(0, 1)
            .flatten(1, 2)[:, :kv_len]
            .repeat_interleave(len(rows) // pool.shape[1], 0)
            for pool in (key_pool, value_pool)
        )
        scores = rows @ keys.transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(kv_len - rows.shape[1], kv_len, device=q.device)[:, None]
        key = torch.arange(kv_len, device=q.device)[None]
        seen = (key <= position) & (key > position - (window or kv_len))
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., :kv_len]
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs).to(q.dtype)
