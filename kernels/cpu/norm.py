"""RMSNorm of float32 rows, in 16 sums per row whose order never changes."""

from __future__ import annotations

import numpy as np
import torch

from .panels import PANEL
from .team import address, as_float, bits, cpu_jit, empty, floats_at, kernel, take

_PIECE = 8  # rows that a thread takes at a time: the rows of a decoding step are not worth waking others for


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x²) + epsilon) * weight (+ residual) over the last dimension; all float32, x and residual [..., N]
    contiguous."""
    out = empty(*x.shape)
    width = weight.shape[0]
    _rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, bits(epsilon), address(residual)
    )
    return out


@cpu_jit
def square_sum(x, width):
    """Of `width` float32 at an address."""
    cells = floats_at(x)
    sums = np.zeros(PANEL, dtype=np.float32)
    whole = width // PANEL * PANEL
    for start in range(0, whole, PANEL):
        for lane in range(PANEL):
            sums[lane] += cells[start + lane] * cells[start + lane]
    for lane in range(width - whole):
        sums[lane] += cells[whole + lane] * cells[whole + lane]
    total = np.float32(0.0)
    for lane in range(PANEL):
        total += sums[lane]
    return total


@kernel
def _rms_norm(words):
    x, weight, out, rows, width, epsilon = words[1], words[2], words[3], words[4], words[5], as_float(words[6])
    factors = floats_at(weight)
    while True:
        first = take(words) * _PIECE
        if first >= rows:
            break
        for row in range(first, min(first + _PIECE, rows)):
            start = 4 * row * width
            mean = square_sum(x + start, width) / np.float32(width)
            scale = np.float32(1.0) / np.sqrt(mean + np.float32(epsilon))
            source, target = floats_at(x + start), floats_at(out + start)
            for column in range(width):
                target[column] = source[column] * scale * factors[column]
            if words[7]:
                terms = floats_at(words[7] + start)
                for column in range(width):
                    target[column] += terms[column]
