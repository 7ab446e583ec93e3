"""Guessing what a sequence writes next: whatever followed the last time its newest tokens stood together. Pure Python.

    … the wheel of a mill … by the wheel of ▲         suffix "wheel of" stood before: guess "a mill …"

The model checks all guesses of a sequence in one step, beside its newest token, and each row samples with the noise of
its own position. So a guess that equals what is sampled there saves a step, one that does not costs a row of
arithmetic, and the tokens are those of a run without guesses.
"""

from __future__ import annotations

from .plan import Slice
from .sequence import Sequence

_LONGEST, _SHORTEST = 4, 2  # tokens of a suffix that is looked for, the longest first
_PATIENCE = 2  # guesses in a row of which nothing was right, before a sequence takes a rest
_REST, _LONGEST_REST = 8, 256  # tokens; twice as long each time


class Drafter:
    """The guesses for one sequence.

    Args:
        most: tokens of one guess.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: where what followed it last begins
        self._indexed = 0  # tokens whose n-grams are in `_after`
        self._length = most
        self._failed = 0  # guesses in a row
        self._rest = _REST
        self._resumes = 0  # no guess while the sequence is shorter

    def draft(self, ids: list[int], most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow `ids`; none where nothing suggests any.

        `ids` are those of the call before and what was appended since.
        """
        most = min(most, self._length)
        if most <= 0 or len(ids) < self._resumes:
            return ()
        self._index(ids)
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._after.get(tuple(ids[-size:]))
            if start is not None:
                # Where the guess reaches the end it goes on from its own beginning: the text goes round in a circle.
                known = ids[start : start + most]
                return tuple(known[i % len(known)] for i in range(most))
        return ()

    def learn(self, drafted: int, accepted: int, num_tokens: int) -> None:
        """How many of a guess were right; the sequence has `num_tokens` now."""
        if accepted:
            self._failed, self._rest = 0, _REST
            self._length = self._most if accepted == drafted else min(self._most, accepted + 1)
            return
        self._length = max(1, self._length // 2)
        self._failed += 1
        if self._failed >= _PATIENCE:
            self._failed, self._resumes = 0, num_tokens + self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)

    def _index(self, ids: list[int]) -> None:
        """Note what followed each n-gram, up to the one that ends before the newest token."""
        for end in range(max(self._indexed, 1), len(ids)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)


class Speculation:
    """What all sequences guess, and how much of it comes true.

    Args:
        most: tokens of one guess; 0: nothing is guessed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.drafted = 0  # guessed tokens that were computed, since the start
        self.accepted = 0  # those of them that came true

    def draft(self, sequence: Sequence, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that may follow, and no more than it may write before its last."""
        if sequence.drafter is None:
            sequence.drafter = Drafter(self.most)
        return sequence.drafter.draft(sequence.token_ids, min(most, sequence.tokens_left - 1))

    def learn(self, piece: Slice, accepted: int) -> None:
        """The first `accepted` of a slice's guesses are tokens of its sequence now."""
        self.drafted += len(piece.draft)
        self.accepted += accepted
        if piece.sequence.drafter is not None:
            piece.sequence.drafter.learn(len(piece.draft), accepted, len(piece.sequence.token_ids))
