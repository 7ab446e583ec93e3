"""Gumbel noise from a counter: a function of (seed, position, token) and of nothing else.

argmax(logits + noise) is a sample of softmax(logits). Because no generator carries state, a request draws the same
tokens whatever else is in the batch, and another worker can go on at any position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MASK64 = (1 << 64) - 1
# 23 bits: with 24, (2**24 - 1 + 0.5) / 2**24 rounds to 1.0 in float32, whose noise is infinite.
_BITS = 23
# SplitMix64's factors and shifts.
_SPLITMIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Two 32-bit keys per row, from its 64-bit seed and the number of tokens sampled before: [R, 2] int32."""
    return torch.from_numpy(row_keys_array(seeds, positions)).to(device)


def row_keys_array(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """`row_keys` on the host."""
    seeded = _mix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    keys = _mix64(seeded + np.array(positions, dtype=np.uint64))
    return np.stack([keys, keys >> np.uint64(32)], axis=1).astype(np.uint32).view(np.int32)


def hash_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """The part of the hash that is the same for every row: int32 of the shape of `token_ids`."""
    return _mixed(token_ids.to(torch.int32) * _signed(0x9E3779B1))


def gumbel(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        keys: [R, 2] int32.
        hashes: [R, K] or [1, K] int32, of the tokens whose noise is wanted.

    Returns:
        [R, K] float32, in about (-2.8, 16.7).
    """
    bits = _mixed(hashes ^ keys[:, :1], keys[:, 1:])
    bits >>= 32 - _BITS
    bits &= (1 << _BITS) - 1
    return bits.float().add_(0.5).mul_(2.0**-_BITS).log_().neg_().log_().neg_()


def _mixed(x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
    """An avalanche over int32, in place; `key` joins half way. Multiplications wrap; a right shift of a signed number
    copies its sign, hence the masks. Shifts and factors are those of Chris Wellons' low-bias search."""
    shifted = x >> 16
    x ^= shifted.bitwise_and_(0xFFFF)
    x *= _signed(0x7FEB352D)
    if key is not None:
        x ^= key
    torch.bitwise_right_shift(x, 15, out=shifted)
    x ^= shifted.bitwise_and_(0x1FFFF)
    x *= _signed(0x846CA68B)
    torch.bitwise_right_shift(x, 16, out=shifted)
    x ^= shifted.bitwise_and_(0xFFFF)
    return x


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64. Arrays of unsigned numbers wrap."""
    x = x + _SPLITMIX[0]
    x = (x ^ (x >> _SHIFTS[0])) * _SPLITMIX[1]
    x = (x ^ (x >> _SHIFTS[1])) * _SPLITMIX[2]
    mixed: npt.NDArray[np.uint64] = x ^ (x >> _SHIFTS[2])
    return mixed


def _signed(x: int) -> int:
    """The low 32 bits of `x` as a signed number, which is what an int32 tensor takes."""
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x
