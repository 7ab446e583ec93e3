"""The paged K/V pool: one pair of tensors per layer, shaped as the model's layers are.

Within a block the heads come first, so that a gather copies whole runs and gives what a batched product reads:

    pool       [num_blocks, heads, block_size, head_dim]
    as rows    [num_blocks * heads, block_size * head_dim]    row (block, head): one gather copies block_size tokens
    as tokens  [num_blocks * heads * block_size, head_dim]    where one token's head is stored
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .transfers import upload_ints


@dataclass(frozen=True, slots=True)
class LayerShape:
    """K/V of one layer: `heads` key-value heads of `key_dim` and `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


class Pool(Protocol):
    """What a step needs of a pool, whatever its layout."""

    block_size: int
    dtype: torch.dtype
    device: torch.device

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        ...


class KVCache:
    """K/V of all layers.

    Args:
        layers: the shape of each layer.
        num_blocks, block_size: of the pool; block 0 stays zero.
        dtype, device: of the tensors.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        rows = [(num_blocks * shape.heads, shape) for shape in layers]
        self._keys = [zeros(n, block_size * shape.key_dim, dtype, device) for n, shape in rows]
        self._values = [zeros(n, block_size * shape.value_dim, dtype, device) for n, shape in rows]
        # What a gather writes to; shared by the layers, since each is read before the next one writes. Fresh memory
        # for every layer of every step would fault its pages in again each time.
        self._key_buffer = torch.empty(0, dtype=dtype, device=device)
        self._value_buffer = torch.empty(0, dtype=dtype, device=device)

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools of a layer themselves: K [num_blocks, heads, block_size, key_dim] and V likewise."""
        shape = self.layers[layer]
        leading = (self.num_blocks, shape.heads, self.block_size)
        return self._keys[layer].view(*leading, shape.key_dim), self._values[layer].view(*leading, shape.value_dim)

    def store(self, layer: int, index: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's K/V.

        Args:
            index: [heads * T] int64, see `AttentionBatch.store_index`.
            keys, values: [heads, T, head_dim].
        """
        shape = self.layers[layer]
        self._keys[layer].view(-1, shape.key_dim).index_copy_(0, index, keys.reshape(-1, shape.key_dim))
        self._values[layer].view(-1, shape.value_dim).index_copy_(0, index, values.reshape(-1, shape.value_dim))

    def gather(self, layer: int, index: torch.Tensor, num_sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bring blocks together.

        Args:
            index: [num_sequences * heads * blocks] int64 rows of the pool.

        Returns:
            K [num_sequences, heads, blocks * block_size, key_dim] and V likewise, valid until the next gather.
        """
        shape = self.layers[layer]
        self._key_buffer, keys = _take(self._keys[layer], index, self._key_buffer)
        self._value_buffer, values = _take(self._values[layer], index, self._value_buffer)
        leading = (num_sequences, shape.heads, -1)
        return keys.view(*leading, shape.key_dim), values.view(*leading, shape.value_dim)

    def zero(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks with zeros in every layer."""
        index = upload_ints(blocks, self.device)
        for pools in (self._keys, self._values):
            for pool in pools:
                pool.view(self.num_blocks, -1).index_fill_(0, index, 0)


def zeros(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(rows, columns, dtype=dtype, device=device)
    # calloc: the kernel gives pages when they are first written, so that a big pool costs nothing until it is used.
    return torch.from_numpy(np.zeros(rows * columns * dtype.itemsize, dtype=np.uint8)).view(dtype).view(rows, columns)


def _take(pool: torch.Tensor, index: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`pool[index]` written into `buffer`, which is returned too: a larger one where it was too small."""
    columns = pool.shape[1]
    size = index.shape[0] * columns
    if buffer.numel() < size:
        buffer = torch.empty(max(size, 2 * buffer.numel()), dtype=pool.dtype, device=pool.device)
    out = buffer[:size].view(-1, columns)
    torch.index_select(pool, 0, index, out=out)
    return buffer, out
