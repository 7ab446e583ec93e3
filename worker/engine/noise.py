"""The keys of the sampler's noise, which is a function of (seed, position, token) and of nothing else.

argmax(logits + Gumbel noise) is a sample of softmax(logits). Because no generator carries state, a request draws the
same tokens whatever else is in the batch, and another worker can go on at any position. The kernels make a token's
noise from the row's keys; `gumbel_reference` in `kernels/gumbel.py` writes it down.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .transfers import upload

_MASK64 = (1 << 64) - 1
# SplitMix64's factors and shifts.
_SPLITMIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)
_SHIFTS = np.array([30, 27, 31], dtype=np.uint64)


def row_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> torch.Tensor:
    """Two 32-bit keys per row, from its 64-bit seed and the number of tokens sampled before: [R, 2] int32."""
    return upload(row_keys_array(seeds, positions), device)


def row_keys_array(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """`row_keys` on the host."""
    seeded = _mix64(np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64))
    keys = _mix64(seeded + np.array(positions, dtype=np.uint64))
    return np.stack([keys, keys >> np.uint64(32)], axis=1).astype(np.uint32).view(np.int32)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64. Arrays of unsigned numbers wrap."""
    x = x + _SPLITMIX[0]
    x = (x ^ (x >> _SHIFTS[0])) * _SPLITMIX[1]
    x = (x ^ (x >> _SHIFTS[1])) * _SPLITMIX[2]
    mixed: npt.NDArray[np.uint64] = x ^ (x >> _SHIFTS[2])
    return mixed
