"""The noise of draws: a function of (seed, position, token), handed in as two 32-bit keys a row; to the bit of its hash
that of the worker's sampler on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _mixed(x: tl.tensor, key: tl.tensor) -> tl.tensor:
    """An avalanche over uint32; `key` joins half way."""
    x = (x ^ (x >> 16)) * tl.full([1], 0x7FEB352D, tl.uint32)
    x = x ^ key
    x = (x ^ (x >> 15)) * tl.full([1], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def gumbel(token: tl.tensor, key_low: tl.tensor, key_high: tl.tensor) -> tl.tensor:
    """Standard Gumbel noise of tokens (int32) in a row whose keys are two uint32."""
    zero = tl.full([1], 0, tl.uint32)
    hashed = _mixed(token.to(tl.uint32) * tl.full([1], 0x9E3779B1, tl.uint32), zero)
    # 23 bits: with 24 the largest would round to 1, whose noise is infinite.
    uniform = ((_mixed(hashed ^ key_low, zero ^ key_high) >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


def _mixed_reference(x: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ key
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def gumbel_reference(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The noise of all tokens, [R, V] float32, for keys [R, 2] int32."""
    low, high = ((keys.long() & 0xFFFFFFFF)[:, column, None] for column in (0, 1))
    token = torch.arange(vocabulary, device=keys.device)[None]
    bits = _mixed_reference(_mixed_reference((token * 0x9E3779B1) & 0xFFFFFFFF, 0) ^ low, high) >> 9
    return -torch.log(-torch.log((bits.float() + 0.5) * 2.0**-23))
