"""Runs the model on a step's slices."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ...shared.errors import EngineError
from . import taint
from .attention import AttentionBackend, PagedAttention
from .batch import AttentionBatch, FlatBatch
from .cuda_graphs import DecodeGraphs, Forward
from .flight import FutureTokens
from .lora import Adapters
from .plan import Slice

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What a step computed.

    Attributes:
        sampled: the slices from which tokens are sampled.
        logits: of their `rows`, [S, vocabulary] float32.
        scored: slices with the logits of their `scored` places, [P, vocabulary] of the model's type.
        drawn: the tokens [S] int64 that plain sampling takes, where they were drawn with the forward.
    """

    sampled: list[Slice]
    logits: torch.Tensor
    scored: list[tuple[Slice, torch.Tensor]]
    drawn: torch.Tensor | None = None

    @classmethod
    def of(cls, slices: Sequence[Slice], logits: torch.Tensor) -> StepLogits:
        """`logits` [S + P, vocabulary], in the order of `FlatBatch.logit_rows`."""
        sampled, scored = [piece for piece in slices if piece.num_sampled], [piece for piece in slices if piece.scored]
        count = sum(piece.num_sampled for piece in sampled)
        parts = torch.split(logits[count:], [len(piece.scored) for piece in scored]) if scored else ()
        return cls(sampled, logits[:count].float(), list(zip(scored, parts, strict=True)))

    @classmethod
    def merged(cls, parts: Sequence[StepLogits]) -> StepLogits:
        if len(parts) == 1:
            return parts[0]
        return cls(
            [piece for part in parts for piece in part.sampled],
            torch.cat([part.logits for part in parts]),
            [scored for part in parts for scored in part.scored],
        )


class ModelRunner:
    """The model, its attention and the pool that its backend uses.

    Args:
        alone: compute each slice by itself. The kernels that multiply matrices round differently for different batch
            sizes, so this is what makes a sequence's bytes independent of its neighbours (the deterministic mode).
        record: makes CUDA graphs of decoding steps, given what computes one.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: PagedAttention,
        backend: AttentionBackend,
        adapters: Adapters | None = None,
        *,
        alone: bool = False,
        record: Callable[[Forward], DecodeGraphs] | None = None,
    ) -> None:
        self.adapters = adapters or Adapters(model, limit=0, device=backend.pool.device)
        self._model = model
        self._attention = attention
        self._cache = backend.pool
        self._alone = alone
        self._record = record
        attention.backend = backend
        # Where the model takes it, its head runs on the sampled rows only.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._graphs = self._make_graphs()

    @torch.inference_mode()
    def run(self, slices: Sequence[Slice], futures: FutureTokens | None = None) -> StepLogits:
        """Compute a step. `futures` are input ids that the host does not know."""
        if self._graphs is not None and self._graphs.fits(slices):
            logits, drawn = self._graphs.run(slices, futures)
            return StepLogits(list(slices), logits, [], drawn)
        self.forget()
        groups = [[piece] for piece in slices] if self._alone else [slices]
        return StepLogits.merged([self._forward(group, futures) for group in groups])

    def forget(self) -> None:
        """Steps may have been computed otherwise than by graphs, or not at all: these trust nothing of the last one."""
        if self._graphs is not None:
            self._graphs.forget()

    def _forward(self, slices: Sequence[Slice], futures: FutureTokens | None) -> StepLogits:
        cache = self._cache
        batch = FlatBatch.build(slices, cache.block_size, dtype=cache.dtype, device=cache.device)
        if futures is not None:
            decoding = batch.slices[: batch.attention.num_decoding]
            futures.fill(batch.input_ids[0], [piece.sequence for piece in decoding])
        keep = {"logits_to_keep": batch.logit_rows} if self._keeps_rows else {}
        with self.adapters.over(batch.slices), taint.watched(self._model, batch.slices) as watched:
            logits = self._call(batch.input_ids, batch.position_ids, batch.attention, **keep)
        computed = StepLogits.of(batch.slices, logits if keep else logits[batch.logit_rows])
        watched.spread(computed.sampled, computed.logits)
        return computed

    def _call(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: AttentionBatch, **keep: torch.Tensor
    ) -> torch.Tensor:
        """Logits of all rows, or of those to keep. input_ids and position_ids [1, T]."""
        self._attention.batch = batch
        try:
            out = self._model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **keep)
        finally:
            self._attention.batch = None
        logits: torch.Tensor = out.logits[0]
        return logits

    @torch.inference_mode()
    def _make_graphs(self) -> DecodeGraphs | None:
        if self._record is None:
            return None
        try:
            return self._record(self._call)
        except RuntimeError as e:  # the model looks at the host within a step, or memory does not suffice
            log.warning("decoding without CUDA graphs, and slower: they could not be recorded: %s", e)
            return None

    def with_model(self, model: nn.Module, attention: PagedAttention) -> ModelRunner:
        """A runner of another model over the same pool; this one is done."""
        backend = self._attention.backend
        assert backend is not None
        self._attention.backend, self._graphs = None, None
        self.adapters.attach(model)
        return ModelRunner(model, attention, backend, self.adapters, alone=self._alone, record=self._record)

    def check_device(self) -> None:
        """Raises EngineError where the device computes nothing any more, as a GPU after a fault of its memory.

        A device whose memory is full answers, too; what torch keeps of it unused is given back.
        """
        try:
            if self._cache.device.type == "cuda":
                torch.cuda.empty_cache()
            torch.ones(1, device=self._cache.device).sum().item()
        except torch.OutOfMemoryError:
            log.warning("%s is full", self._cache.device)
        except RuntimeError as e:
            raise EngineError(f"{self._cache.device} is lost: {e}") from e

    @torch.inference_mode()
    def zero(self, blocks: Sequence[int]) -> None:
        """Clear blocks whose K/V may not be finite."""
        self._cache.zero(blocks)

    def close(self) -> None:
        """Let go of the weights and the pool."""
        self._attention.backend, self._graphs = None, None
        del self._model, self._cache
