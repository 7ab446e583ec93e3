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
from typing import Protocol

import torch

from .batch import AttentionBatch
from .flight import FutureTokens
from .graph_buffers import Buffers, BufferWriter
from .plan import Slice
from .step_tensors import FixedBatch, StepTensors

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
        self._sizes = buckets(min(max_rows, MOST_ROWS))
        width = -(-context_length // block_size)
        self._buffers = Buffers.allocate(self._sizes[-1], width, vocab_size, device)
        self._writer = BufferWriter(self._buffers, block_size)
        self._buffers.longs[2] = -1  # what is captured before the first step stores nothing
        # The largest first: the smaller ones find room in the memory that it used.
        self._replays = {size: capture(self._step(size)) for size in reversed(self._sizes)}

    def fits(self, slices: Sequence[Slice]) -> bool:
        """Whether a step only decodes, with the base model, in no more rows than the largest graph has."""
        return 0 < len(slices) <= self._sizes[-1] and all(map(_only_decodes, slices))

    def run(self, slices: Sequence[Slice], futures: FutureTokens | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step that fits. `futures` are input ids that the host does not know.

        Returns:
            Logits [S, V] float32, and the tokens [S] that plain sampling draws from them; both are overwritten by the
            next step.
        """
        self._writer.write(slices)
        if futures is not None:
            futures.fill(self._buffers.longs[0], [piece.sequence for piece in slices])
        self._replays[self._sizes[bisect_left(self._sizes, len(slices))]]()
        return self._buffers.logits[: len(slices)], self._buffers.tokens[: len(slices)]

    def forget(self) -> None:
        """A step was computed otherwise, see `BufferWriter.forget`."""
        self._writer.forget()

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
    sequence = piece.sequence
    special = piece.draft or piece.scored or sequence.adapter is not None or sequence.taint is not None
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
