"""Decoding steps as CUDA graphs: one launch for the forward and the sampler instead of hundreds.

A graph repeats the same kernels on the same addresses. So its inputs are fixed buffers whose contents change, and there
is a graph for each of a few numbers of rows (buckets); a step takes the smallest that holds it and pads:

    rows          | s0 | s1 | s2 | -- |         bucket 4 of a step of 3
    slot_mapping    35   36   7   -1            stored nowhere
    kv_lens         20   5    8    0            sees nothing, gives zeros

No number of a batch may become part of a graph, since it would be repeated for the next one: kernels read lengths,
tables and sampling parameters from the buffers, and grids follow from the bucket alone.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from .batch import AttentionBatch
from .device_sampler import SamplingArrays
from .plan import Slice
from .sequence import Row
from .step_tensors import FixedBatch, StepTensors, upload

log = logging.getLogger(__name__)

# Above it a step is so long that its launches hide behind it.
MOST_ROWS = 256

Forward = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
Replay = Callable[[], None]


class Capture(Protocol):
    """Records what `step` does on the device, and returns what does it again."""

    def __call__(self, step: Callable[[], None]) -> Replay: ...


def buckets(max_rows: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to `max_rows`, which is the last."""
    sizes = [size for size in (1, 2, 4, *range(8, max_rows, 8)) if size < max_rows]
    return [*sizes, max_rows]


@dataclass(frozen=True, slots=True)
class Buffers:
    """What graphs read and write, as large as the largest bucket."""

    longs: torch.Tensor  # [3, B] int64: input_ids, position_ids, slot_mapping
    kv_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, W] int32
    floats: torch.Tensor  # [3, B] float32: temperature, top-p, min-p
    top_ks: torch.Tensor  # [B] int32
    keys: torch.Tensor  # [B, 2] int32
    logits: torch.Tensor  # [B, V] float32, out
    tokens: torch.Tensor  # [B] int64, out: -1 where the logits were not finite

    @classmethod
    def allocate(cls, rows: int, table_width: int, vocab_size: int, device: torch.device) -> Buffers:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            longs=zeros(3, rows, dtype=torch.int64),
            kv_lens=zeros(rows, dtype=torch.int32),
            block_tables=zeros(rows, table_width, dtype=torch.int32),
            floats=zeros(3, rows, dtype=torch.float32),
            top_ks=zeros(rows, dtype=torch.int32),
            keys=zeros(rows, 2, dtype=torch.int32),
            logits=zeros(rows, vocab_size, dtype=torch.float32),
            tokens=zeros(rows, dtype=torch.int64),
        )

    def fill(self, slices: Sequence[Slice], block_size: int) -> None:
        """Copy a step in; rows behind it become padding. Nothing waits for the device."""
        count, rows = len(slices), self.kv_lens.shape[0]
        longs = np.zeros((3, rows), dtype=np.int64)
        longs[2] = -1
        kv_lens = np.zeros(rows, dtype=np.int32)
        tables = np.zeros((count, max(-(-piece.end // block_size) for piece in slices)), dtype=np.int32)
        for row, piece in enumerate(slices):
            blocks = piece.sequence.block_table[: -(-piece.end // block_size)]
            tables[row, : len(blocks)] = blocks
            slot = blocks[piece.start // block_size] * block_size + piece.start % block_size
            longs[:, row] = piece.sequence.token_ids[piece.start], piece.start, slot
            kv_lens[row] = piece.end
        sampling = SamplingArrays.of([Row(piece.sequence) for piece in slices], rows)
        pairs: tuple[tuple[torch.Tensor, npt.NDArray[Any]], ...] = (
            (self.longs, longs),
            (self.kv_lens, kv_lens),
            (self.block_tables[:count, : tables.shape[1]], tables),
            (self.floats, sampling.floats),
            (self.top_ks, sampling.top_ks),
            (self.keys, sampling.keys),
        )
        for buffer, array in pairs:
            buffer.copy_(upload(array, buffer.device), non_blocking=True)


class DecodeGraphs:
    """The graphs of one model.

    Args:
        forward: input_ids and position_ids [1, B] and their batch → logits [B, V], without a look at the host.
        max_rows: of the largest step that is repeated; larger ones are run.
        context_length: tokens of the longest sequence.
        capture: what records a step; see `capture_on_cuda`.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_rows: int,
        context_length: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._block_size = block_size
        self._sizes = buckets(min(max_rows, MOST_ROWS))
        width = -(-context_length // block_size)
        self._buffers = Buffers.allocate(self._sizes[-1], width, vocab_size, device)
        self._buffers.longs[2] = -1  # what is captured before the first step stores nothing
        # The largest first: the smaller ones find room in the memory that it used.
        self._replays = {size: capture(self._step(size)) for size in reversed(self._sizes)}

    def fits(self, slices: Sequence[Slice]) -> bool:
        """Whether a step only decodes, with the base model, in no more rows than the largest graph has."""
        return 0 < len(slices) <= self._sizes[-1] and all(map(_only_decodes, slices))

    def run(self, slices: Sequence[Slice]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step that fits.

        Returns:
            Logits [S, V] float32, and the tokens [S] that plain sampling draws from them; both are overwritten by the
            next step.
        """
        self._buffers.fill(slices, self._block_size)
        self._replays[self._sizes[bisect_left(self._sizes, len(slices))]]()
        return self._buffers.logits[: len(slices)], self._buffers.tokens[: len(slices)]

    def _step(self, rows: int) -> Callable[[], None]:
        """What one graph does, on the buffers' first `rows` rows."""
        b = self._buffers
        batch = FixedBatch(StepTensors(rows, b.longs[2, :rows], b.block_tables, b.kv_lens, b.kv_lens))

        def step() -> None:
            from ...kernels.sample import sample

            logits = b.logits[:rows]
            logits.copy_(self._forward(b.longs[:1, :rows], b.longs[1:2, :rows], batch))
            temperatures, top_ps, min_ps = (column[:rows] for column in b.floats)
            b.tokens[:rows].copy_(sample(logits, temperatures, b.top_ks[:rows], top_ps, min_ps, b.keys[:rows]))

        return step


def _only_decodes(piece: Slice) -> bool:
    special = piece.draft or piece.scored or piece.sequence.adapter is not None
    return piece.length == 1 and piece.num_sampled == 1 and not special


class CudaCapture:
    """Answers to `Capture`; all graphs share one pool of memory, since no two run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], None]) -> Replay:
        # Once without recording, on another stream as torch asks: kernels are compiled, libraries make their handles.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step()
        return graph.replay


def capture_for(device: torch.device) -> Capture | None:
    """What records steps on a device; None where nothing does."""
    return CudaCapture() if device.type == "cuda" else None
