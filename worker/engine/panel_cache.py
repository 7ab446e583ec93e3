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
        rows = [(num_blocks * shape.heads, shape) for shape in layers]
        self.keys = [zeros(n, shape.key_dim * BLOCK_SIZE, self.dtype, self.device) for n, shape in rows]
        self.values = [zeros(n, _width(shape) * BLOCK_SIZE, self.dtype, self.device) for n, shape in rows]

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        index = torch.tensor(blocks)
        for pool in (*self.keys, *self.values):
            pool.view(self.num_blocks, -1)[index] = 0


def _width(shape: LayerShape) -> int:
    """Columns of V, filled up to whole panels."""
    return -(-shape.value_dim // BLOCK_SIZE) * BLOCK_SIZE
