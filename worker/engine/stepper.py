"""Computes planned steps and takes their results: forward, sample, accept. A step that fails is tried in halves."""

from __future__ import annotations

import logging
from itertools import islice

from ...shared.errors import EngineError
from ..interface import StepOutput
from ..meter import Meter
from .accepting import accept, fail
from .flight import Flight
from .grammar import Grammars
from .logprobs import grouped, score
from .plan import Slice
from .runner import ModelRunner
from .sampler import Sample, Sampler
from .scheduler import Scheduler

log = logging.getLogger(__name__)

# The slices that sample, each with a sample of each of its rows.
Results = list[tuple[Slice, list[Sample]]]
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
        self.steps = self.prefill_tokens = self.decode_tokens = 0  # since the start

    def run(self, slices: list[Slice]) -> list[StepOutput]:
        """Compute a step and wait for its results.

        Raises:
            EngineError: the device is lost: the process must end, and its sequences go on elsewhere.
        """
        self.steps += bool(slices)
        return [output for group in grouped(slices, self._vocab_size) for output in self._advance(group)]

    def launch(self, slices: list[Slice], after: Flight | None) -> Flight:
        """Begin to compute a step of slices that draw plainly; nothing waits for the device.

        Args:
            after: the step before, where its tokens are not known here.
        """
        self._begin(slices)
        futures = after.future_tokens() if after is not None else None
        computed = self._meter.timed("forward", self.runner.run, slices, futures)
        tokens = computed.drawn
        if tokens is None:
            sequences = [piece.sequence for piece in computed.sampled]
            tokens = self._sampler.draw(computed.logits, sequences)
        return Flight.of(slices, computed.sampled, tokens)

    def land(self, flight: Flight) -> list[StepOutput]:
        """Wait for the results of a step that was launched. Sequences that have ended since get none.

        Raises:
            EngineError: the device is lost.
        """
        try:
            results = self._meter.timed("sample", flight.land)
        except RuntimeError as e:  # what a kernel does wrong shows here, and leaves a device that computes nothing more
            raise EngineError(f"the device failed on a step of {len(flight.slices)} sequences: {e}") from e
        self.steps += 1
        return self._take(flight.slices, results)

    def _advance(self, slices: list[Slice]) -> list[StepOutput]:
        """Compute slices. Where that fails they are tried again in halves, so that only the guilty ones pay."""
        if not slices:
            return []
        try:
            results = self._compute(slices)
        except STEP_ERRORS:
            self.runner.check_device()
            if len(slices) == 1:
                log.exception("request %s failed", slices[0].sequence.rid)
                return [fail(self._scheduler, slices[0].sequence)]
            log.warning("a step of %d sequences failed; trying halves", len(slices), exc_info=True)
            middle = len(slices) // 2
            return self._advance(slices[:middle]) + self._advance(slices[middle:])
        return self._take(slices, results)

    def _take(self, slices: list[Slice], results: Results) -> list[StepOutput]:
        """Note what was computed for the sequences that are still here."""
        held = [piece for piece in slices if self._scheduler.holds(piece.sequence)]
        sampled = sum(piece.num_sampled for piece in held)
        self.decode_tokens += sampled
        self.prefill_tokens += sum(piece.length for piece in held) - sampled
        chunks = [StepOutput(piece.sequence.rid) for piece in held if not piece.num_sampled]
        for piece in held:
            self._scheduler.commit(piece)
        holds = self._scheduler.holds
        return chunks + [accept(self._scheduler, piece, drawn) for piece, drawn in results if holds(piece.sequence)]

    def _compute(self, slices: list[Slice]) -> Results:
        self._begin(slices)
        filling = self._grammars.fill([row for piece in slices for row in piece.rows])
        try:
            computed = self._meter.timed("forward", self.runner.run, slices)
        finally:
            masks = filling.result() if filling is not None else None
        for piece, logits in computed.scored:
            score(piece, logits)
        if not computed.sampled:
            return []
        if computed.drawn is not None and all(piece.sequence.plain for piece in computed.sampled):
            return self._meter.timed("sample", Flight.of(slices, computed.sampled, computed.drawn).land)
        rows = [row for piece in computed.sampled for row in piece.rows]
        samples = iter(self._meter.timed("sample", self._sampler.sample, computed.logits, rows, masks))
        return [(piece, list(islice(samples, piece.num_sampled))) for piece in computed.sampled]

    def _begin(self, slices: list[Slice]) -> None:
        """Clear blocks that were given back with K/V that may not be finite; say who writes to blocks now."""
        blocks = self._scheduler.blocks
        if blocks.dirty:
            self.runner.zero(blocks.dirty)
            blocks.dirty.clear()  # not before: where it fails they are still to be cleared
        for piece in slices:
            piece.sequence.writing = piece
