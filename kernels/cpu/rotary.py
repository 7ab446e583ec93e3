"""Rotary positions for queries and keys in one pass."""

from __future__ import annotations

import torch

from .team import cpu_jit, floats_at, kernel, take

_PIECE = 4  # tokens that a thread takes at a time


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn the two halves of each head: (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        q, k: [H, T, D] and [Hk, T, D] float32, the last dimension contiguous.
        cos, sin: [T, D] float32, contiguous.

    Returns:
        q and k turned, [H, T, D] and [Hk, T, D], the heads of a token side by side in memory.
    """
    outs = [x.new_empty(x.shape[1], x.shape[0], x.shape[2]) for x in (q, k)]
    pointers = (tensor.data_ptr() for tensor in (q, k, cos, sin, *outs))
    _rotate(*pointers, q.shape[1], q.shape[0], k.shape[0], q.shape[2], *q.stride()[:2], *k.stride()[:2])
    return outs[0].transpose(0, 1), outs[1].transpose(0, 1)


@cpu_jit
def _turn(x, head_stride, out, heads, size, cos, sin):
    """All heads of one token."""
    half = size // 2
    cosines, sines = floats_at(cos), floats_at(sin)
    for head in range(heads):
        source, target = floats_at(x + 4 * head * head_stride), floats_at(out + 4 * head * size)
        for d in range(half):
            a, b = source[d], source[d + half]
            target[d] = a * cosines[d] - b * sines[d]
            target[d + half] = b * cosines[d + half] + a * sines[d + half]


@kernel
def _rotate(words):
    tokens, q_heads, k_heads, size = words[7], words[8], words[9], words[10]
    while True:
        first = take(words) * _PIECE
        if first >= tokens:
            break
        for token in range(first, min(first + _PIECE, tokens)):
            angle = 4 * token * size
            q, k = words[1] + 4 * token * words[12], words[2] + 4 * token * words[14]
            q_out, k_out = words[5] + q_heads * angle, words[6] + k_heads * angle
            _turn(q, words[11], q_out, q_heads, size, words[3] + angle, words[4] + angle)
            _turn(k, words[13], k_out, k_heads, size, words[3] + angle, words[4] + angle)
