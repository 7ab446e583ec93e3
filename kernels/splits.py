"""A sequence's keys in splits, which different programs attend to: where they lie, and how their results become one.

    keys of a sequence     start                                  kv_len        start: 0, or the window's begin rounded
                           |---split 0---|---split 1---|--split 2--|             down to a tile of keys

How long a split is follows on the device from the sequence's own length and two constants of the launch, `num_splits`
and `split_size`: a CUDA graph that was captured at one length is right at all, and a sequence's sum runs in the same
order whatever else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .tiles import power_of_two


@triton.jit
def first_key(kv_len: int, window: int, WINDOWED: tl.constexpr, KEYS: tl.constexpr) -> tl.tensor:
    if WINDOWED:
        return tl.maximum(kv_len - window, 0) // KEYS * KEYS
    return 0


@triton.jit
def split_length(num_keys: int, NUM_SPLITS: tl.constexpr, SPLIT_KEYS: tl.constexpr) -> tl.tensor:
    """Keys of a split: SPLIT_KEYS, or as many times that as NUM_SPLITS splits need to hold all keys."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), SPLIT_KEYS), 1) * SPLIT_KEYS


@triton.jit
def _merge_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    kv_lens: tl.tensor,
    out: tl.tensor,
    num_heads: int,
    window: int,
    VALUE_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    kv_len = tl.load(kv_lens + sequence)
    num_keys = kv_len - first_key(kv_len, window, WINDOWED, KEYS)
    used = tl.maximum(tl.cdiv(num_keys, split_length(num_keys, NUM_SPLITS, SPLIT_KEYS)), 1)
    split = tl.arange(0, PADDED_SPLITS)
    dim = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    row = sequence.to(tl.int64) * num_heads + head
    weights = tl.load(lse + row * NUM_SPLITS + split, mask=split < used, other=float("-inf"))
    best = tl.max(weights, 0)
    weights = tl.exp2(weights - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, 0)
    at = partial + (row * NUM_SPLITS + split)[:, None] * VALUE_DIM + dim[None, :]
    parts = tl.load(at, mask=(split < used)[:, None] & (dim < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * VALUE_DIM + dim, result.to(out.dtype.element_ty), mask=dim < VALUE_DIM)


def merge_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None,
    key_tile: int,
    split_size: int,
) -> None:
    """Merge results of splits by their log-sum-exp, a program for each sequence and head and 64 of Dv.

    Args:
        partial: [S, H, num_splits, Dv] float32, written for the splits that have keys; lse: [S, H, num_splits] float32,
            in units of log2.
        kv_lens: [S] int32.
        out: [S, H, Dv], contiguous: written.
        window, key_tile, split_size: as the splits were made.
    """
    sequences, heads, num_splits, value_dim = partial.shape
    dims = min(power_of_two(value_dim), 64)
    _merge_kernel[(sequences, heads, -(-value_dim // dims))](
        partial,
        lse,
        kv_lens,
        out,
        heads,
        window or 0,
        VALUE_DIM=value_dim,
        DIMS=dims,
        KEYS=key_tile,
        NUM_SPLITS=num_splits,
        PADDED_SPLITS=power_of_two(num_splits),
        SPLIT_KEYS=split_size,
        WINDOWED=window is not None,
        num_warps=4,
    )
