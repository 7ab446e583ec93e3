"""Who computes what in the next step: continuous batching under a token budget. Pure Python.

    waiting (in order) ──admit──► running (in order) ──► finished
            ▲                        │
            └── preempt (recompute) ─┘

A step is one flat batch: a token of every sequence that decodes, then chunks of those that prefill, then what is
admitted with the budget that is left. The order is lane (rt, std, batch), then age. The last of it pays when blocks
run out: it loses its K/V, keeps its tokens, and later finds in the prefix cache what nobody has overwritten.

Nobody starves: whoever waits is at the head of its lane once the older ones are through, nobody overtakes the head,
and a sequence that was not let for `ageing` steps goes up a lane.
"""

from __future__ import annotations

from .admission import Admission
from .blocks import BlockAllocator
from .plan import Plan, Slice
from .prefix import PrefixCache
from .roster import Roster, yields
from .sequence import Sequence
from .speculation import Drafter, Speculation

# Prompt tokens that are admitted and not computed yet, in steps: beyond them another worker would be sooner.
_BACKLOG = 4


class Scheduler:
    """Holds all sequences; `schedule` plans a step, `commit` notes that it ran, `verify` that it ran well.

    Args:
        blocks: the pool. One sequence of `max_tokens` must fit into it alone; the engine sees to that.
        max_running: sequences with K/V at one time.
        max_batch_tokens: budget of a step; at least `max_running`.
        fixed_chunks: cut prompts at multiples of `max_batch_tokens` and compute every output token alone, so that
            the shape of each computation depends on nothing but the sequence (the deterministic mode). What was
            computed in another shape differs in its last bits, so nothing is shared then.
        prefix_cache: whether K/V are shared between sequences that begin alike.
        speculate: guessed tokens that a sequence computes beside its newest one, where the budget has room left.
        ageing: steps of waiting after which a sequence goes up a lane.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        max_running: int,
        max_batch_tokens: int,
        fixed_chunks: bool = False,
        prefix_cache: bool = True,
        speculate: int = 0,
        ageing: int = 1000,
    ) -> None:
        assert max_batch_tokens >= max_running, "a step must have room for every sequence that decodes"
        self.blocks = blocks
        self.cache = PrefixCache(blocks, enabled=prefix_cache and not fixed_chunks)
        self.max_running = max_running
        self.max_batch_tokens = max_batch_tokens
        self.fixed_chunks = fixed_chunks
        self.speculation = Speculation(0 if fixed_chunks else speculate)
        self.preemptions = 0  # since the start
        self._roster = Roster(ageing)
        self.running, self._waiting = self._roster.running, self._roster.waiting
        self._admission = Admission(blocks, self.running, max_running)
        self._stalled = False  # whether the last plan left a sequence waiting, for want of blocks, slots or budget
        self._backlog = 0  # tokens that the last plan left to prefill

    def __len__(self) -> int:
        return len(self._roster)

    def __contains__(self, rid: str) -> bool:
        return rid in self._roster

    def holds(self, sequence: Sequence) -> bool:
        """Whether a sequence runs or waits here, and not another one under its rid."""
        return self._roster.get(sequence.rid) is sequence

    def rids(self) -> list[str]:
        return self._roster.rids()

    def free_slots(self) -> int:
        """How many more sequences may come. None while some wait here: what is still in the queue is chosen there,
        lane by lane and tenant by tenant, and may find room at another worker sooner."""
        if self._stalled or self._backlog > _BACKLOG * self.max_batch_tokens:
            return 0
        return max(self.max_running - len(self), 0)

    def add(self, sequence: Sequence) -> None:
        self._roster.add(sequence)

    def remove(self, rid: str) -> Sequence | None:
        """Forget a sequence, finished or aborted, and free its blocks."""
        sequence = self._roster.get(rid)
        if sequence is None:
            return None
        if sequence.running:
            self.cache.release(sequence)
            if sequence.finish() is not None:
                self._admission.expected.ended(sequence)
        self._roster.remove(sequence)
        self._stalled = self._stalled and bool(self._waiting)
        return sequence

    def schedule(self) -> list[Slice]:
        """Plan a step; the blocks of its tokens are allocated. Empty only when nothing waits or runs."""
        # Fixed chunks are not cut to what decoding leaves over, so they get room beside it.
        plan = Plan(self.max_batch_tokens + self.fixed_chunks * self.max_running)
        preemptions = self.preemptions
        self._plan_running(plan)
        if self._waiting and self.preemptions == preemptions:
            self._admit(plan)
        self._roster.age(self._waiting)
        self._stalled = bool(self._waiting)
        if self.speculation.most:
            self._draft(plan)
        return plan.slices()

    def commit(self, piece: Slice) -> None:
        """Note that a slice was computed; its guesses do not count before `verify`. One that has lost its blocks since
        is computed again."""
        if piece.sequence.running:
            piece.sequence.num_computed = piece.start + piece.length - len(piece.draft)

    def retract(self) -> None:
        """Send everything that runs back to wait: its K/V is no longer what the model would compute, nor is what the
        prefix cache holds."""
        while self.running:
            self._preempt(self.running[-1], Plan(0))
        self.cache.flush()

    def verify(self, piece: Slice, accepted: int = 0) -> None:
        """Note that a slice's K/V are finite, and that the first `accepted` of its guesses are tokens of the sequence
        now. Its full blocks may be shared; blocks of wrong guesses are given back."""
        sequence = piece.sequence
        sequence.num_computed += accepted
        if sequence.writing is piece:  # else a step that was launched since writes behind it
            sequence.writing = None
        if piece.draft:
            self.speculation.learn(piece, accepted)
            surplus = self.blocks.blocks_for(sequence.num_computed)
            self.blocks.free(sequence.block_table[surplus:])
            del sequence.block_table[surplus:]
        self.cache.register(sequence)

    def start_again(self, sequence: Sequence) -> None:
        """Send a sequence back to wait, and guess no more for it: what its guesses left behind its newest token is not
        fit to be attended to."""
        sequence.drafter = Drafter(0)
        self._preempt(sequence, Plan(0))

    def check_integrity(self) -> None:
        """Assert that no block, sequence or slot is lost."""
        assert len(self.running) <= self.max_running, "more sequences run than there are slots"
        self._roster.check_integrity()
        self.blocks.check_integrity(sequence.block_table for sequence in self.running)
        self.cache.check_integrity(self.running)

    def _plan_running(self, plan: Plan) -> None:
        """Give what runs its share: one token to each that decodes, then chunks to those that prefill."""
        prefilling, size, budget = [], self.blocks.block_size, plan.budget
        for sequence in self.running.copy():
            tokens = len(sequence.token_ids)
            if tokens - sequence.num_computed > 1:
                prefilling.append(sequence)
            elif sequence.ends_in_future:
                continue
            elif sequence.running and (  # most find a place in the block they have: no call for those
                tokens <= len(sequence.block_table) * size or self._reserve(sequence, 1, plan)
            ):
                plan.lengths[sequence] = 1
        plan.budget = budget - len(plan.lengths)
        held_up, self._backlog = [], 0
        for sequence in prefilling:
            length = self._chunk(sequence, sequence.num_computed, plan)
            if not length:
                held_up.append(sequence)
            elif sequence.running and self._reserve(sequence, length, plan):
                plan.take(sequence, length)
            self._backlog += sequence.num_pending - length
        self._roster.age(held_up)

    def _admit(self, plan: Plan) -> None:
        """Start what waits, in order. Nobody overtakes: what does not fit now would otherwise wait for ever."""
        plan.promised = sum(self._admission.growth(sequence) for sequence in self.running)
        for sequence in self._waiting.copy():
            hits = self.cache.match(sequence)
            if self.cache.worth_waiting(sequence, len(hits)):
                continue
            length = self._chunk(sequence, len(hits) * self.blocks.block_size, plan)
            if not length or not self._make_room(sequence, hits, plan):
                return
            self._start(sequence, hits, length, plan)

    def _draft(self, plan: Plan) -> None:
        """Give what is left of the budget to guesses of those that decode; nobody pays for them with blocks."""
        for sequence, length in plan.lengths.items():
            if plan.budget <= 0:
                return
            if length == sequence.num_pending == 1:
                room = (len(sequence.block_table) + self.blocks.num_free) * self.blocks.block_size
                draft = self.speculation.draft(sequence, min(plan.budget, room - len(sequence.token_ids)))
                if draft:
                    self._reserve(sequence, 1 + len(draft), plan)
                    plan.guess(sequence, draft)

    def _start(self, sequence: Sequence, hits: list[int], length: int, plan: Plan) -> None:
        self._roster.start(sequence)
        self.cache.admit(sequence, hits)
        self._reserve(sequence, length, plan)
        plan.take(sequence, length)
        plan.promised += self._admission.growth(sequence)
        self._backlog += sequence.num_pending - length

    def _chunk(self, sequence: Sequence, computed: int, plan: Plan) -> int:
        """How many tokens after the `computed` ones go into this step."""
        if not self.fixed_chunks:
            return min(len(sequence.token_ids) - computed, plan.budget, sequence.max_chunk)
        left = sequence.num_prompt_tokens - computed
        length = min(left, self.max_batch_tokens, sequence.max_chunk) if left > 0 else 1
        return length if length <= plan.budget else 0

    def _reserve(self, sequence: Sequence, length: int, plan: Plan) -> bool:
        """Give a running sequence the blocks of its next tokens, at the cost of the last in order.
        False where that was the sequence itself."""
        need = self.blocks.blocks_for(sequence.num_computed + length) - len(sequence.block_table)
        if need <= 0:
            return True
        while need > self.blocks.num_free:
            victim = self.running[-1]
            victim.preempted = True
            self._admission.expected.too_low()
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.block_table += self.blocks.allocate(need)
        return True

    def _make_room(self, sequence: Sequence, hits: list[int], plan: Plan) -> bool:
        """Whether a waiting sequence may start: at the cost of the newest of those that yield to it, where their
        places are enough."""
        admission = self._admission
        if admission.fits(sequence, hits, plan.promised):
            return True
        yielding = [other for other in self.running if yields(other, sequence)]
        if not admission.would_fit(sequence, hits, plan.promised, without=yielding):
            return False
        while yielding and not admission.fits(sequence, hits, plan.promised):
            victim = yielding.pop()
            plan.promised -= admission.growth(victim)
            self._preempt(victim, plan)
        return admission.fits(sequence, hits, plan.promised)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        self.preemptions += 1
        plan.drop(sequence)
        self.cache.release(sequence)
        self._roster.send_back(sequence)
