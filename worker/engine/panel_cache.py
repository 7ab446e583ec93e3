"""The paged K/V pool of a CPU, laid out as the operands of its kernels (`kernels/cpu/attention.py` draws them)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kernels.cpu.attention import BLOCK_SIZE
from .kv_cache import LayerShape, zeros


class PanelCache:
    """K/V of all layers in float32: keys [num_blocks, heads, key_dim, 16], values [num_blocks, heads, ⌈value_dim / 16⌉,
    16, 16]. Block 0 stays zero."""

    block_size = BLOCK_SIZE
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, layers: Sequence[LayerShape], *, num_blocks: int) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        n, size = num_blocks, BLOCK_SIZE
        self.keys = [zeros(n, shape.heads * shape.key_dim * size, self.dtype, self.device) for shape in layers]
        self.values = [zeros(n, shape.heads * _width(shape) * size, self.dtype, self.device) for shape in layers]

    @classmethod
    def bytes_per_token(cls, layers: Sequence[LayerShape]) -> int:
        return sum(shape.heads * (shape.key_dim + _width(shape)) * cls.dtype.itemsize for shape in layers)

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        index = torch.tensor(blocks)
        for pool in (*self.keys, *self.values):
            pool[index] = 0


def _width(shape: LayerShape) -> int:
    """Columns of V, filled up to whole panels."""
    return -(-shape.value_dim // BLOCK_SIZE) * BLOCK_SIZE
