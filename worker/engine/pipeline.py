"""Overlap scheduling: while the device computes a step, the host takes the one before and plans the one after.

What draws plainly is launched ahead. A step that needs its own tokens on the host before the next can be planned or
sampled (grammars, penalties, log-probabilities, guesses) ends the run: what is in flight lands, and the next step is
planned when all is known. Between two calls every sequence is as it would be without overlap, but that the K/V of
its newest token may be on their way; so whoever aborts or takes blocks away need not know of any of this. A sequence
that ends at a step of which the next one is in flight has a token computed for nothing: it is dropped, its blocks are
cleared before anybody else reads them, for nobody has looked at what was written there.
"""

from __future__ import annotations

import logging

from ..interface import StepOutput
from ..meter import Meter
from .flight import Flight, ahead_of
from .plan import Slice
from .scheduler import Scheduler
from .stepper import STEP_ERRORS, Stepper

log = logging.getLogger(__name__)


class Pipeline:
    """Plans, runs and takes steps, one by one or overlapped.

    Args:
        meter: of the phase "schedule".
        overlap: whether steps are launched ahead, where they can be; may be changed between two steps.
    """

    def __init__(self, scheduler: Scheduler, stepper: Stepper, meter: Meter, *, overlap: bool) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._meter = meter
        self.overlap = overlap
        self._flight: Flight | None = None

    def step(self) -> list[StepOutput]:
        """Answer for one step.

        Raises:
            EngineError: the device is lost.
        """
        flight = self._in_flight()
        if flight is None:
            slices = self._plan()
            flight = self._launch(slices)
            if flight is None:
                return self._stepper.run(slices)
        self._flight = self._launch_after(flight)
        return self._stepper.land(flight)

    def discard(self) -> None:
        """Forget what is in flight: it is planned and computed again, which gives the same tokens."""
        self._flight = None
        self._stepper.runner.forget()

    def _in_flight(self) -> Flight | None:
        """What was launched, unless all that it was for has ended."""
        flight, self._flight = self._flight, None
        if flight is None or not any(self._scheduler.holds(piece.sequence) for piece in flight.slices):
            return None
        return flight

    def _launch_after(self, flight: Flight) -> Flight | None:
        """Launch the step after `flight`, whose tokens only the device knows."""
        with ahead_of(flight, self._scheduler):
            return self._launch(self._plan(), flight)

    def _plan(self) -> list[Slice]:
        return self._meter.timed("schedule", self._scheduler.schedule)

    def _launch(self, slices: list[Slice], after: Flight | None = None) -> Flight | None:
        """None where the step cannot be launched: it is run when all before it is known."""
        if not (self.overlap and slices and all(map(_launchable, slices))):
            return None
        try:
            return self._stepper.launch(slices, after)
        except STEP_ERRORS:
            self._stepper.runner.check_device()
            log.warning("a step of %d sequences could not be launched", len(slices), exc_info=True)
            return None


def _launchable(piece: Slice) -> bool:
    sequence = piece.sequence
    return not piece.draft and sequence.scored is None and (sequence.plain or not piece.num_sampled)
