"""Takes what a step computed into its sequences, and says what came of it."""

from __future__ import annotations

import logging

from ...shared.chunks import Finish
from ..interface import StepOutput
from .plan import Slice
from .sampler import Sample
from .scheduler import Scheduler
from .sequence import Sequence

log = logging.getLogger(__name__)

FAILED = Finish("error", message="the model failed on this request", status=500)
_DEAD_END = Finish(
    "error", message="No token may come next: grammar, bans and minimum length exclude all of them.", status=400
)


def accept(scheduler: Scheduler, piece: Slice, drawn: list[Sample]) -> StepOutput:
    """Take what was sampled from a slice, up to the first token that was not guessed; end the sequence where it must
    end. `drawn` holds a sample for each of the slice's rows."""
    sequence = piece.sequence
    if drawn[0].token_id is None:
        return _give_up(scheduler, sequence, drawn[0])
    finish = sequence.finish()  # where no token was asked for, but what the prompt scores
    taken: list[Sample] = []
    for guess, sampled in zip((*piece.draft, None), drawn, strict=True):
        if finish is not None or sampled.token_id is None:
            break
        finish = sequence.append(sampled.token_id)
        taken.append(sampled)
        if sampled.token_id != guess:
            break
    if all(sampled.token_id is not None or sampled.excluded for sampled in drawn):
        scheduler.verify(piece, max(len(taken) - 1, 0))
    else:  # NaN in a guess's K/V, which would spread from behind the sequence's end
        scheduler.start_again(sequence)
    if finish is not None:
        scheduler.remove(sequence.rid)
    return _output(sequence, taken, finish)


def fail(scheduler: Scheduler, sequence: Sequence, finish: Finish = FAILED) -> StepOutput:
    """End a sequence that cannot go on."""
    scheduler.remove(sequence.rid)
    return StepOutput(sequence.rid, finish=finish)


def _give_up(scheduler: Scheduler, sequence: Sequence, drawn: Sample) -> StepOutput:
    """End a sequence for which there is no next token."""
    if not drawn.excluded:
        log.error("request %s: the logits are not finite", sequence.rid)
        return fail(scheduler, sequence)
    complete = sequence.matcher is not None and sequence.matcher.complete
    return fail(scheduler, sequence, Finish("stop") if complete else _DEAD_END)


def _output(sequence: Sequence, taken: list[Sample], finish: Finish | None) -> StepOutput:
    logprobs = tuple(sampled.logprob for sampled in taken if sampled.logprob is not None)
    cached = None if sequence.announced else sequence.cached_tokens
    sequence.announced = True
    token_ids = tuple(sequence.token_ids[len(sequence.token_ids) - len(taken) :])
    return StepOutput(sequence.rid, token_ids, logprobs or None, finish, cached, sequence.take_scored())
