"""A step on its way: the device computes it, and the host knows already what comes after it.

    host      | plan 7 | launch 7 | wait 6, take 6 | plan 8 | launch 8 | wait 7, take 7 | …
    device    … step 6 ──────────►|  step 7 ────────────────────────►|  step 8 ─────── …
                     tokens of 6 ──┘ (on the device)                └─ tokens of 7

Step 7 is planned before the tokens of step 6 are known. They stay on the device, which puts them among the input ids of
step 7, and arrive here by a copy that is waited for when step 7 runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from .plan import Slice
from .sampler import Sample
from .scheduler import Scheduler
from .sequence import FUTURE, Sequence
from .transfers import Download, upload


@dataclass(frozen=True, slots=True)
class Flight:
    """What was launched.

    Attributes:
        slices: all of the step.
        sampled: those of them that draw a token, one each.
        tokens: [len(sampled)] int64, drawn on the device; -1 where the logits were not finite. A step that is launched
            later may overwrite them.
    """

    slices: list[Slice]
    sampled: list[Slice]
    tokens: torch.Tensor
    arriving: Download

    @classmethod
    def of(cls, slices: list[Slice], sampled: list[Slice], tokens: torch.Tensor) -> Flight:
        return cls(slices, sampled, tokens, Download(tokens))

    def land(self) -> list[tuple[Slice, list[Sample]]]:
        """What each slice has drawn: the step's one wait for the device."""
        tokens = self.arriving.wait().tolist()
        return [(piece, [Sample.of(token)]) for piece, token in zip(self.sampled, tokens, strict=True)]

    def future_tokens(self) -> FutureTokens:
        return FutureTokens(self.tokens, [piece.sequence for piece in self.sampled])


@contextmanager
def ahead_of(flight: Flight, scheduler: Scheduler) -> Iterator[None]:
    """Within it plans are made as if the flight had landed: FUTURE stands for each token that it draws."""
    going_on = [piece.sequence for piece in flight.sampled if piece.sequence.running]
    for piece in flight.slices:
        scheduler.commit(piece)
    for sequence in going_on:
        sequence.token_ids.append(FUTURE)
    try:
        yield
    finally:
        for sequence in going_on:
            sequence.token_ids.pop()


class FutureTokens:
    """Tokens that are known to the device alone.

    Args:
        tokens: [S] int64.
        sequences: whose newest they are.
    """

    def __init__(self, tokens: torch.Tensor, sequences: list[Sequence]) -> None:
        self._tokens = tokens
        self._sequences = sequences

    def fill(self, input_ids: torch.Tensor, sequences: Rows[Sequence]) -> None:
        """Put them where they belong in `input_ids` [T] int64, whose first rows are the newest tokens of `sequences`.
        Nothing waits for the device.

        A row that is not finite draws -1, which no embedding has: its sequence ends when that is known, and what it is
        given here makes no difference.
        """
        if sequences == self._sequences:  # most steps: nobody came, nobody went
            torch.clamp_min(self._tokens, 0, out=input_ids[: len(sequences)])
            return
        row_of = {sequence: row for row, sequence in enumerate(self._sequences)}
        places = [(row_of[sequence], row) for row, sequence in enumerate(sequences) if sequence in row_of]
        if places:
            source, target = upload(np.array(places, dtype=np.int64).T.copy(), input_ids.device)
            input_ids.index_copy_(0, target, self._tokens[source].clamp_min(0))
