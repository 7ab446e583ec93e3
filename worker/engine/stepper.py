"""Computes planned steps and takes their results: forward, sample, accept. A step that fails is tried in halves."""

from __future__ import annotations

import logging
from itertools import islice

from ..interface import StepOutput
from ..meter import Meter
from .accepting import accept, fail
from .device_sampler import is_plain, samples
from .grammar import Grammars
from .logprobs import grouped, score
from .plan import Slice
from .runner import ModelRunner
from .sampler import Sample, Sampler
from .scheduler import Scheduler

log = logging.getLogger(__name__)

# What a forward or the sampler can raise for data's sake: torch's errors are RuntimeErrors, out of memory among them.
STEP_ERRORS = (RuntimeError, ValueError, IndexError, ArithmeticError)


class Stepper:
    """Runs the plans of one scheduler.

    Args:
        runner: computes them; exchanged together with the model's weights.
        meter: of the phases "forward" and "sample".
        vocab_size: columns of the logits, which bound how many prompt tokens are scored at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        grammars: Grammars,
        meter: Meter,
        *,
        vocab_size: int,
    ) -> None:
        self.runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._grammars = grammars
        self._meter = meter
        self._vocab_size = vocab_size

    def run(self, slices: list[Slice]) -> list[StepOutput]:
        """Compute a step and wait for its results.

        Raises:
            EngineError: the device is lost: the process must end, and its sequences go on elsewhere.
        """
        return [output for group in grouped(slices, self._vocab_size) for output in self._advance(group)]

    def _advance(self, slices: list[Slice]) -> list[StepOutput]:
        """Compute slices. Where that fails they are tried again in halves, so that only the guilty ones pay."""
        if not slices:
            return []
        try:
            sampled, samples = self._compute(slices)
        except STEP_ERRORS:
            self.runner.check_device()
            if len(slices) == 1:
                log.exception("request %s failed", slices[0].sequence.rid)
                return [fail(self._scheduler, slices[0].sequence)]
            log.warning("a step of %d sequences failed; trying halves", len(slices), exc_info=True)
            middle = len(slices) // 2
            return self._advance(slices[:middle]) + self._advance(slices[middle:])
        counts = [(piece, piece.num_sampled) for piece in sampled]  # before tokens are taken
        chunks = [StepOutput(piece.sequence.rid) for piece in slices if not piece.num_sampled]
        for piece in slices:
            self._scheduler.commit(piece)
        drawn = iter(samples)
        return chunks + [accept(self._scheduler, piece, list(islice(drawn, count))) for piece, count in counts]

    def _compute(self, slices: list[Slice]) -> tuple[list[Slice], list[Sample]]:
        """The slices from which tokens are sampled, and a sample of each of their rows."""
        self._clean()
        for piece in slices:
            piece.sequence.verified = False
        filling = self._grammars.fill([row for piece in slices for row in piece.rows])
        try:
            computed = self._meter.timed("forward", self.runner.run, slices)
        finally:
            masks = filling.result() if filling is not None else None
        for piece, logits in computed.scored:
            score(piece, logits)
        if not computed.sampled:
            return [], []
        rows = [row for piece in computed.sampled for row in piece.rows]
        if computed.drawn is not None and masks is None and all(map(is_plain, rows)):
            return computed.sampled, samples(computed.drawn)
        return computed.sampled, self._meter.timed("sample", self._sampler.sample, computed.logits, rows, masks)

    def _clean(self) -> None:
        """Clear blocks that were given back with K/V that may not be finite."""
        dirty = self._scheduler.blocks.take_dirty()
        if dirty:
            self.runner.zero(dirty)
