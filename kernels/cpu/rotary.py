"""Rotary positions for queries and keys in one pass."""

from __future__ import annotations

import numpy as np
import torch

from .norm import square_sum
from .team import as_float, bits, cpu_jit, empty, floats_at, kernel, take

_PIECE = 4  # tokens that a thread takes at a time


def rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the two halves of each head: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        q, k: [H, T, D] and [Hk, T, D] float32, the last dimension contiguous.
        cos, sin: [T, D] float32, contiguous.
        norms: weights [D] float32 for q and for k, and an epsilon: each head goes through an RMSNorm first.

    Returns:
        q and k turned, [H, T, D] and [Hk, T, D], the heads of a token side by side in memory.
    """
    outs = [empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q, k)]
    pointers = (tensor.data_ptr() for tensor in (q, k, cos, sin, *outs))
    weights = (0, 0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), bits(norms[2]))
    _rotate(*pointers, q.shape[1], q.shape[0], k.shape[0], q.shape[2], *q.stride()[:2], *k.stride()[:2], *weights)
    return outs[0].transpose(0, 1), outs[1].transpose(0, 1)


@cpu_jit
def _normalise(source, target, size, weight, epsilon):
    mean = square_sum(source, size) / np.float32(size)
    scale = np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))
    before, after, factors = floats_at(source), floats_at(target), floats_at(weight)
    for d in range(size):
        after[d] = before[d] * scale * factors[d]


@cpu_jit
def _turn(x, head_stride, out, heads, size, cos, sin, weight, epsilon):
    """All heads of one token."""
    half = size // 2
    cosines, sines = floats_at(cos), floats_at(sin)
    for head in range(heads):
        start, end = x + 4 * head * head_stride, out + 4 * head * size
        if weight:
            _normalise(start, end, size, weight, epsilon)
            start = end
        source, target = floats_at(start), floats_at(end)
        for d in range(half):
            a, b = source[d], source[d + half]
            target[d] = a * cosines[d] - b * sines[d]
            target[d + half] = b * cosines[d + half] + a * sines[d + half]


@kernel
def _rotate(words):
    tokens, q_heads, k_heads, size = words[7], words[8], words[9], words[10]
    epsilon = as_float(words[17])
    while True:
        first = take(words) * _PIECE
        if first >= tokens:
            break
        for token in range(first, min(first + _PIECE, tokens)):
            angle = 4 * token * size
            q, k = words[1] + 4 * token * words[12], words[2] + 4 * token * words[14]
            q_out, k_out = words[5] + q_heads * angle, words[6] + k_heads * angle
            cos, sin = words[3] + angle, words[4] + angle
            _turn(q, words[11], q_out, q_heads, size, cos, sin, words[15], epsilon)
            _turn(k, words[13], k_out, k_heads, size, cos, sin, words[16], epsilon)
