"""Who computes what in the next step: continuous batching under a token budget. Pure Python.

    waiting (one queue per lane: rt, std, batch) ──admit──► running ──► finished
                     ▲                                         │
                     └──────────── preempt (recompute) ────────┘

A step is one flat batch: a token of every sequence that decodes, then chunks of those that prefill, then what is
admitted with the budget that is left. Sequences go first by lane, then by age; the last of that order pays when
blocks run out: it loses its K/V, keeps its tokens, and computes them again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ...shared.messages import LANES, Lane
from .blocks import BlockAllocator
from .sequence import Row, Sequence

# Most sequences stop long before max_new_tokens, so admission counts on this share of what they may still write.
EXPECTED_OUTPUT = 0.5

_RANK: dict[Lane, int] = {lane: rank for rank, lane in enumerate(LANES)}


def _order(sequence: Sequence) -> tuple[int, int]:
    return _RANK[sequence.lane], sequence.arrival


@dataclass(frozen=True, slots=True)
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
    def rows(self) -> list[Row]:
        """What is sampled from, in the order of the flat batch."""
        return [Row(self.sequence, self.draft[:count]) for count in range(self.num_sampled)]


class Scheduler:
    """Holds all sequences; `schedule` plans a step, `commit` notes that it ran.

    Args:
        blocks: the pool. One sequence of `max_tokens` must fit into it alone; the engine sees to that.
        max_running: sequences with K/V at one time.
        max_batch_tokens: budget of a step; at least `max_running`.
        fixed_chunks: cut prompts at multiples of `max_batch_tokens` and compute every output token alone, so that
            the shape of each computation depends on nothing but the sequence (the deterministic mode).
    """

    def __init__(
        self, blocks: BlockAllocator, *, max_running: int, max_batch_tokens: int, fixed_chunks: bool = False
    ) -> None:
        assert max_batch_tokens >= max_running, "a step must have room for every sequence that decodes"
        self.blocks = blocks
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.fixed_chunks = fixed_chunks
        self.running: list[Sequence] = []
        self.preemptions = 0  # since the start
        self.stalled = False  # whether the last plan left a sequence waiting, for want of blocks, slots or budget
        self._waiting: dict[Lane, deque[Sequence]] = {lane: deque() for lane in LANES}
        self._by_rid: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_rid)

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def rids(self) -> list[str]:
        return list(self._by_rid)

    def add(self, sequence: Sequence) -> None:
        self._by_rid[sequence.rid] = sequence
        self._waiting[sequence.lane].append(sequence)

    def remove(self, rid: str) -> Sequence | None:
        """Forget a sequence, finished or aborted, and free its blocks."""
        sequence = self._by_rid.pop(rid, None)
        if sequence is None:
            return None
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting[sequence.lane].remove(sequence)
        self.stalled = self.stalled and any(self._waiting.values())
        return sequence

    def schedule(self) -> list[Slice]:
        """Plan a step; the blocks of its tokens are allocated. Empty only when nothing waits or runs."""
        plan: dict[Sequence, int] = {}
        self.running.sort(key=_order)
        self._plan_running(plan, decoding=True)
        self._plan_running(plan, decoding=False)
        self._admit(plan)
        self.stalled = any(self._waiting.values())
        return [Slice(sequence, sequence.num_computed, length) for sequence, length in plan.items()]

    def commit(self, piece: Slice) -> None:
        """Note that a slice was computed."""
        piece.sequence.num_computed = piece.end

    def retract(self) -> None:
        """Send everything that runs back to wait, in order: its K/V is no longer what the model would compute."""
        for sequence in sorted(self.running, key=_order, reverse=True):
            self._preempt(sequence, {})

    def check_integrity(self) -> None:
        """Assert that no block, sequence or slot is lost."""
        waiting = [sequence for queue in self._waiting.values() for sequence in queue]
        assert all(not sequence.block_table for sequence in waiting), "a waiting sequence owns blocks"
        assert len(self.running) <= self.max_running, "more sequences run than there are slots"
        held = sorted(sequence.rid for sequence in (*waiting, *self.running))
        assert held == sorted(self._by_rid), "a sequence is lost, or stands in two places"
        self.blocks.check_integrity(sequence.block_table for sequence in self.running)

    def _plan_running(self, plan: dict[Sequence, int], *, decoding: bool) -> None:
        for sequence in list(self.running):
            if (sequence.num_pending == 1) is not decoding or sequence not in self.running:
                continue
            length = self._chunk(sequence, self.max_batch_tokens - sum(plan.values()))
            if length and self._reserve(sequence, length, plan):
                plan[sequence] = length

    def _admit(self, plan: dict[Sequence, int]) -> None:
        for sequence in self._candidates():
            length = self._chunk(sequence, self.max_batch_tokens - sum(plan.values()))
            if not length or not self._make_room(sequence, plan):
                return  # nobody overtakes: what does not fit now would otherwise wait for ever
            self._waiting[sequence.lane].popleft()
            self.running.append(sequence)
            sequence.block_table = self.blocks.allocate(self.blocks.blocks_for(length))
            plan[sequence] = length

    def _candidates(self) -> Iterator[Sequence]:
        for queue in self._waiting.values():
            while queue:
                yield queue[0]

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """How many of a sequence's pending tokens go into this step."""
        if not self.fixed_chunks:
            return min(sequence.num_pending, budget)
        left = sequence.num_prompt_tokens - sequence.num_computed
        length = min(left, self.max_batch_tokens) if left > 0 else 1
        return length if length <= budget else 0

    def _reserve(self, sequence: Sequence, length: int, plan: dict[Sequence, int]) -> bool:
        """Give a running sequence the blocks of its next tokens, at the cost of the last in order.
        False where that was the sequence itself."""
        need = self.blocks.blocks_for(sequence.num_computed + length) - len(sequence.block_table)
        while need > self.blocks.num_free:
            victim = max(self.running, key=_order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        if need > 0:
            sequence.block_table += self.blocks.allocate(need)
        return True

    def _make_room(self, sequence: Sequence, plan: dict[Sequence, int]) -> bool:
        """Whether a waiting sequence may start. One of an interactive lane sends the newest of the batch lane back."""
        while not self._fits(sequence):
            victim = max(self.running, key=_order)
            if _RANK[victim.lane] <= _RANK[sequence.lane] or victim.lane != "batch":
                return False
            self._preempt(victim, plan)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self.max_running:
            return False
        promised = sum(self._expected_blocks(other) for other in self.running)
        return promised + self._expected_blocks(sequence) <= self.blocks.usable

    def _expected_blocks(self, sequence: Sequence) -> int:
        left = sequence.max_tokens - len(sequence.token_ids)
        return self.blocks.blocks_for(len(sequence.token_ids) + int(left * EXPECTED_OUTPUT))

    def _preempt(self, sequence: Sequence, plan: dict[Sequence, int]) -> None:
        self.preemptions += 1
        plan.pop(sequence, None)
        self.running.remove(sequence)
        self._release(sequence)
        self._waiting[sequence.lane].appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.block_table, dirty=not sequence.verified)
        sequence.block_table = []
        sequence.num_computed = 0
        sequence.verified = True
