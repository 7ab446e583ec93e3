"""activation(gate) * up of two products that were computed apart, as `linear.gated` computes it within one."""

from __future__ import annotations

import torch

from .exponential import gelu_tanh, silu
from .linear import SILU
from .team import floats_at, kernel, take

_PIECE = 4096  # numbers that a thread takes at a time


def activate(gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """The same bits as `linear.gated` gives for such products.

    Args:
        gate, up: float32 of one shape, contiguous.
        activation: SILU or GELU_TANH.
    """
    out = torch.empty_like(up)
    _activate(gate.data_ptr(), up.data_ptr(), out.data_ptr(), up.numel(), activation)
    return out


@kernel
def _activate(words):
    gates, ups, out = floats_at(words[1]), floats_at(words[2]), floats_at(words[3])
    size, activation = words[4], words[5]
    while True:
        first = take(words) * _PIECE
        if first >= size:
            break
        last = min(first + _PIECE, size)
        if activation == SILU:
            for i in range(first, last):
                out[i] = ups[i] * silu(gates[i])
        else:
            for i in range(first, last):
                out[i] = ups[i] * gelu_tanh(gates[i])
