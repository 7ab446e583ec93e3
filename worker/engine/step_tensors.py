"""A step's index arithmetic on the device, made once a step and read by the kernels of every layer.

rows            | d0 | d1 | d2 | c0 c0 c0 c0 c0 | c1 c1 |       decoding sequences first, one row each; then chunks
slot_mapping      35   36   7    80 81 82 83 84   12 13         block * block_size + offset; -1: stored nowhere
kv_lens           d0   d1   d2   c0               c1            tokens that a sequence's last row sees
cu_seqlens_q                    |0               |5    |7       of the chunks alone
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .batch import AttentionBatch
from .transfers import upload


@dataclass(frozen=True, slots=True)
class StepTensors:
    """`slot_mapping` [T] int64; `block_tables` [S, W], `kv_lens` [S] and `cu_seqlens_q` [chunks + 1] int32."""

    num_decoding: int
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    @classmethod
    def of(cls, batch: AttentionBatch, block_size: int, device: torch.device) -> StepTensors:
        blocks, offsets = batch.places()
        bounds = np.cumsum([0] + [chunk.stop - chunk.start for chunk in batch.chunks])
        return cls(
            batch.num_decoding,
            upload(blocks * block_size + offsets, device),
            upload(batch.tables().astype(np.int32), device),
            upload(batch.kv_lens().astype(np.int32), device),
            upload(bounds.astype(np.int32), device),
        )


class FixedBatch(AttentionBatch):
    """A batch whose tensors stay where they are while their contents change: what a CUDA graph reads."""

    def __init__(self, tensors: StepTensors) -> None:
        super().__init__([], 1, dtype=torch.float32, device=tensors.kv_lens.device)
        self.tensors = tensors
