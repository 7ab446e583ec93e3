"""NaN in a prompt's K/V that its last token does not see: behind a sliding window its logits are finite, and the blocks
would go into the prefix cache, or to another sequence, as sound ones.

    hidden rows of a chunk [T, width] ──max |x|──► * 0 ──► 0, or NaN      added to the logits that the prompt ends with

A row attends to itself, so what is not finite in its K/V of any layer is not finite in its last hidden state. Whatever
then finds NaN in logits does as it always does. Nothing waits for the device. A maximum, since sums tell `ForeignSums`
that rows may depend on their batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .plan import Slice


class Watched:
    """The hidden states [T, width] of a step's forward."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        self._slices = slices

    def note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A hook of the model below its head. Each sequence keeps 0, or NaN, of its prompt so far."""
        hidden, start = output[0][0], 0
        for piece in self._slices:
            if _hides(piece):
                stop = start + piece.length - len(piece.draft)  # a guess that fails is judged by its own row
                zero = hidden[start:stop].abs().amax().float() * 0
                before = piece.sequence.taint
                piece.sequence.taint = zero if before is None else before + zero
            start += piece.length

    @staticmethod
    def spread(sampled: Sequence[Slice], logits: torch.Tensor) -> None:
        """Add what the sequences keep to their `logits` [S, vocabulary], in place."""
        row = 0
        for piece in sampled:
            if piece.sequence.taint is not None:
                logits[row : row + piece.num_sampled] += piece.sequence.taint
                piece.sequence.taint = None
            row += piece.num_sampled


@contextmanager
def watched(model: Any, slices: Sequence[Slice]) -> Iterator[Watched]:
    """Watch a forward; one without chunks of prompts costs nothing."""
    watched = Watched(slices)
    below = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if not isinstance(below, nn.Module) or not any(map(_hides, slices)):
        yield watched
        return
    hook = below.register_forward_hook(watched.note)
    try:
        yield watched
    finally:
        hook.remove()


def _hides(piece: Slice) -> bool:
    """Whether a slice has rows whose logits nobody looks at."""
    return piece.length - len(piece.draft) > 1 or not piece.num_sampled
