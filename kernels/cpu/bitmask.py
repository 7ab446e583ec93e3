"""Bans what a grammar does not allow, 64 tokens at a look: most words of a mask allow all of theirs, or none."""

from __future__ import annotations

import numpy as np
import torch

from .team import cpu_jit, floats_at, integers_at, kernel, take

_WORD = 64  # tokens
_BANNED = np.float32(-np.inf)


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """Set logits of banned tokens to -inf, in place.

    Args:
        logits: [R, V] float32, contiguous.
        bitmask: [M, 2 * ceil(V / 64)] int32, contiguous; token t of a row is allowed where bit t % 32 of word t // 32
            is set.
        rows: [M] int64, the row that each mask is for; -1 for none.
    """
    assert logits.dtype == torch.float32, "the sampler's logits are float32"
    assert logits.is_contiguous(), "rows stand side by side"
    size, words = logits.shape[1], -(-logits.shape[1] // _WORD)
    assert bitmask.shape[1] == 2 * words, "a row of the mask is whole words of 64 bits"
    _apply(logits.data_ptr(), bitmask.data_ptr(), rows.data_ptr(), len(rows), size, words)


@cpu_jit
def _ban(logits, mask, size, words):
    for number in range(words):
        word, start = mask[number], number * _WORD
        if word == -1:
            continue
        count = min(_WORD, size - start)
        if word == 0:
            for i in range(count):
                logits[start + i] = _BANNED
            continue
        for i in range(count):
            if not (word >> i) & 1:
                logits[start + i] = _BANNED


@kernel
def _apply(words):
    logits, mask, rows, count, size, width = words[1], words[2], integers_at(words[3]), words[4], words[5], words[6]
    while True:
        number = take(words)
        if number >= count:
            break
        if rows[number] >= 0:
            _ban(floats_at(logits + 4 * rows[number] * size), integers_at(mask + 8 * number * width), size, width)
