"""Paged K/V pools with random contents, and block tables over them, for the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import interpreter  # noqa: F401  makes it faster

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# What a kernel may differ from its twin, on values of about 1.
TOLERANCE: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}
# Triton's interpreter computes bfloat16 wrongly, so only a GPU tries it.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@dataclass(frozen=True)
class Pools:
    """`keys` [num_blocks, Hk, block_size, D], `values` [num_blocks, Hk, block_size, Dv], `block_tables` [S, W] int32,
    `kv_lens` [S] int32. Places that no sequence owns hold NaN: whoever reads them shows it."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def pools(
    kv_lens: Sequence[int],
    *,
    kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Pools:
    """Pools in which the blocks of the sequences lie in random order."""
    counts = [-(-length // block_size) for length in kv_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = torch.zeros(len(kv_lens), max(counts) + 1, dtype=torch.int32)
    keys = torch.full((sum(counts) + 1, kv_heads, block_size, key_dim), torch.nan)
    values = torch.full((sum(counts) + 1, kv_heads, block_size, value_dim or key_dim), torch.nan)
    keys[0], values[0] = 0, 0
    for row, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
        blocks = torch.tensor([order.pop() + 1 for _ in range(count)])  # 0 is the null block
        tables[row, :count] = blocks
        position = torch.arange(length)
        for seed, pool in enumerate((keys, values)):
            content = random(length, kv_heads, pool.shape[-1], seed=10 * row + seed).cpu()
            pool[blocks[position // block_size], :, position % block_size] = content
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    return Pools(keys.to(DEVICE, dtype), values.to(DEVICE, dtype), tables.to(DEVICE), lens.to(DEVICE))
