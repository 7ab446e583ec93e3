"""A step as the scheduler plans it: slices of sequences, cut from the step's budget. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Row, Sequence


@dataclass(slots=True, eq=False)
class Slice:
    """Tokens `start … start + length` of a sequence, computed in one step; the last of them may be guesses."""

    sequence: Sequence
    start: int
    length: int
    draft: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """The slice's input ids."""
        return [*self.sequence.token_ids[self.start : self.end], *self.draft]

    @property
    def num_sampled(self) -> int:
        """From how many of the slice's last rows a token is sampled: none where it does not reach the newest token."""
        return 1 + len(self.draft) if self.end - len(self.draft) == len(self.sequence.token_ids) else 0

    @property
    def scored(self) -> range:
        """The places whose logits tell of the next token of the prompt, where somebody asks."""
        return self.sequence.unscored(self.start, self.end)

    @property
    def rows(self) -> list[Row]:
        """What is sampled from, in the order of the flat batch."""
        return [Row(self.sequence, self.draft[:count]) for count in range(self.num_sampled)]


class Plan:
    """What has been given away of a step's budget, and of the pool."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.promised = 0  # free blocks that what runs is expected to need
        self.lengths: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, tuple[int, ...]] = {}

    def take(self, sequence: Sequence, length: int) -> None:
        self.lengths[sequence] = length
        self.budget -= length

    def drop(self, sequence: Sequence) -> None:
        self.budget += self.lengths.pop(sequence, 0)

    def guess(self, sequence: Sequence, draft: tuple[int, ...]) -> None:
        self.drafts[sequence] = draft
        self.lengths[sequence] += len(draft)
        self.budget -= len(draft)

    def slices(self) -> list[Slice]:
        drafts = self.drafts
        return [
            Slice(sequence, sequence.num_computed, length, drafts.get(sequence, ()) if drafts else ())
            for sequence, length in self.lengths.items()
        ]
