"""How much of what they may write sequences do write: learnt from those that end. Pure Python.

Most requests name no limit, or a generous one, and stop long before it. A pool that reserved the limit would run few
of them at a time; one that reserved nothing would throw out what it has begun, over and over.
"""

from __future__ import annotations

from .sequence import Sequence

_START = 0.5
_MEMORY = 64  # sequences; what ended long before counts little
_SURPRISE = 0.25  # of the way to 1 with each sequence that had to be thrown out


class ExpectedOutput:
    """The share of their remaining tokens that sequences are expected to write: tokens written over tokens allowed,
    each sequence weighing as much as it may hold."""

    def __init__(self) -> None:
        self._allowed = 1024.0
        self._written = _START * self._allowed

    @property
    def ratio(self) -> float:
        return self._written / self._allowed

    def tokens(self, sequence: Sequence) -> int:
        """How long a sequence is expected to become, prompt and output. One that was thrown out for want of blocks
        is expected to use all it may, or it would be thrown out again."""
        ratio = 1.0 if sequence.preempted else self.ratio
        return len(sequence.token_ids) + int(sequence.tokens_left * ratio)

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that ended by itself."""
        keep = 1 - 1 / _MEMORY
        self._allowed = self._allowed * keep + sequence.max_tokens - sequence.num_prompt_tokens
        self._written = self._written * keep + sequence.num_output_tokens

    def too_low(self) -> None:
        """Learn that blocks ran out."""
        self._written += _SURPRISE * (self._allowed - self._written)
