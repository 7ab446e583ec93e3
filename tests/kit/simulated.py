"""A model that computes nothing: it plays the forward over a scheduler's plans, and knows what blocks must hold.

A hash of the seed and of all tokens up to it stands for a token's K/V. Who computes a token must find the hashes of
all tokens before it in its own blocks, and may only write to blocks that are its own alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows

import torch
from headrace.shared.messages import GenerateJob, Lane, SamplingParams
from headrace.worker.engine.flight import FutureTokens
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.prefix import cache_seed
from headrace.worker.engine.runner import StepLogits
from headrace.worker.engine.sampler import Sample
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.sequence import FUTURE, Row, Sequence

NAN = "nan"


def sequence(
    rid: str,
    prompt: int | list[int],
    output: int,
    *,
    lane: Lane = "std",
    arrival: int = 0,
    tenant: str = "",
    produced: tuple[int, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> Sequence:
    """A sequence of `prompt` tokens (or of so many made-up ones) that writes `output` of them, if nothing stops it."""
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(max_new_tokens=output)
    job = GenerateJob(rid, "m", "m", "", tuple(ids), params, lane=lane, tenant=tenant)
    return Sequence(
        job=job,
        token_ids=[*ids, *produced],
        num_prompt_tokens=len(ids),
        max_tokens=len(ids) + output,
        stop_ids=stop_ids,
        seed=0,
        arrival=arrival,
        cache_seed=cache_seed("m", tenant, "1"),
    )


class SimulatedDevice:
    """The pool of one scheduler, and who may write and read there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.weights = 0  # their version: a flush comes with new ones
        self._scheduler = scheduler
        size = scheduler.blocks.block_size
        self._empty: list[tuple[int | str, int] | None] = [None] * size
        self._pool = [self._empty.copy() for _ in range(scheduler.blocks.num_blocks)]
        self._running: set[Sequence] = set()
        self._newest: dict[Sequence, int] = {}  # tokens that stand in the place of FUTURE

    def change_weights(self) -> None:
        """What runs keeps its K/V, also what was admitted and has not computed yet."""
        self.weights += 1
        self._running = set(self._scheduler.running)

    def zero(self, blocks: Rows[int]) -> None:
        for block in blocks:
            self._pool[block] = self._empty.copy()

    def compute(self, slices: Rows[Slice], fails: Callable[[Slice], bool], newest: dict[Sequence, int]) -> None:
        """Store and look up the K/V of a step. Where it fails what is stored is not finite."""
        self._newest = newest
        for piece in slices:
            self._write(piece, fails(piece))
        for piece in slices:
            self._read(piece)
        self._running = set(self._scheduler.running)

    def hashes(self, piece: Slice) -> list[int]:
        """Of all tokens up to the slice's last."""
        hashes, last = [], hash(piece.sequence.cache_seed)
        for token in [*piece.sequence.token_ids[: piece.start], *piece.token_ids]:
            last = hash((last, self._newest[piece.sequence] if token == FUTURE else token))
            hashes.append(last)
        return hashes

    def _write(self, piece: Slice, fails: bool) -> None:
        blocks, size = self._scheduler.blocks, self._scheduler.blocks.block_size
        hashes = self.hashes(piece)
        for position in range(piece.start, piece.end):
            block = piece.sequence.block_table[position // size]
            holders = [s for s in self._scheduler.running if block in s.block_table]
            assert holders == [piece.sequence], "a write to a block that others read"
            assert block not in blocks._key_of, "a write to a block whose content is known"
            self._pool[block][position % size] = (NAN if fails else hashes[position]), self.weights

    def _read(self, piece: Slice) -> None:
        """Check all that a slice attends to."""
        bad = piece.sequence.rid.startswith("bad")
        held = [cell for block in piece.sequence.block_table for cell in self._pool[block]]
        assert bad or NAN not in [cell[0] for cell in held if cell], "NaN of another sequence in one's own block"
        for position, wanted in enumerate(self.hashes(piece)):
            cell = held[position]
            assert cell is not None, "K/V that nobody computed"
            assert cell[0] == wanted or (bad and cell[0] == NAN), "K/V of other tokens"
            found = position < piece.start and piece.sequence not in self._running
            assert not found or cell[1] == self.weights, "K/V of old weights"


class SimulatedModel:
    """Runs the plans of one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.device = SimulatedDevice(scheduler)

    def step(self, failing: Collection[str] = ()) -> list[Slice]:
        """Plan a step and run it. The logits of `failing` sequences are not finite, nor is the K/V they write."""
        slices = self.scheduler.schedule()
        self._assert_sound(slices)
        dirty = self.scheduler.blocks.dirty
        self.device.zero(dirty)
        dirty.clear()
        for piece in slices:
            piece.sequence.writing = piece
        self.device.compute(slices, lambda piece: piece.sequence.rid in failing, {})
        for piece in slices:
            self._accept(piece, piece.sequence.rid in failing)
        self.scheduler.check_integrity()
        return slices

    def _assert_sound(self, slices: list[Slice]) -> None:
        scheduler = self.scheduler
        beside = scheduler.max_running if scheduler.fixed_chunks else 0
        assert sum(piece.length for piece in slices) <= scheduler.max_batch_tokens + beside
        assert len({piece.sequence for piece in slices}) == len(slices), "a sequence is planned twice"
        assert slices or not len(scheduler), "a step without work, and sequences to work on"
        decoding = [s for s in scheduler.running if s.num_pending == 1]
        planned = {piece.sequence for piece in slices}
        assert planned.issuperset(decoding), "a sequence that decodes is left out"
        for piece in slices:
            assert piece.length > 0
            assert piece.start == piece.sequence.num_computed
            assert len(piece.sequence.block_table) == scheduler.blocks.blocks_for(piece.end), (
                "a slice without its blocks"
            )

    def _accept(self, piece: Slice, fails: bool) -> None:
        sampled = piece.num_sampled
        self.scheduler.commit(piece)
        if not sampled:
            return
        if fails:
            self.scheduler.remove(piece.sequence.rid)
            return
        finish, accepted = None, -1
        for guess, row in zip((*piece.draft, None), self.device.hashes(piece)[-sampled:], strict=True):
            finish, accepted = piece.sequence.append(row % 3), accepted + 1
            if finish is not None or row % 3 != guess:
                break
        self.scheduler.verify(piece, accepted)
        if finish is not None:
            self.scheduler.remove(piece.sequence.rid)


class SimulatedRunner:
    """Stands for the `ModelRunner` and the `Sampler` of a `Stepper`, over a simulated device.

    A sequence whose rid begins with "bad" fails from its `BAD_AFTER`th output token on.
    """

    BAD_AFTER = 2

    def __init__(self, scheduler: Scheduler) -> None:
        self.device = SimulatedDevice(scheduler)

    def run(self, slices: list[Slice], futures: FutureTokens | None = None) -> StepLogits:
        decoding = [piece for piece in slices if piece.length == 1]
        input_ids = torch.tensor([piece.token_ids[0] for piece in decoding], dtype=torch.int64)
        if futures is not None:
            futures.fill(input_ids, [piece.sequence for piece in decoding])
        assert FUTURE not in input_ids, "a token that nobody knows"
        newest = dict(zip([piece.sequence for piece in decoding], input_ids.tolist(), strict=True))
        self.device.compute(slices, self._fails, newest)
        sampled = [piece for piece in slices if piece.num_sampled]
        tokens = [-1 if self._fails(piece) else self.device.hashes(piece)[-1] % 3 for piece in sampled]
        drawn = torch.tensor(tokens, dtype=torch.int64)
        return StepLogits(sampled, drawn[:, None].float(), [], drawn)

    def _fails(self, piece: Slice) -> bool:
        sequence = piece.sequence
        return sequence.rid.startswith("bad") and piece.end >= sequence.num_prompt_tokens + self.BAD_AFTER

    def sample(self, logits: torch.Tensor, rows: Rows[Row], masks: None) -> list[Sample]:
        return [Sample.of(int(token)) for (token,) in logits.tolist()]

    def fill(self, rows: Rows[Row]) -> None:
        """Nobody has a grammar."""

    def zero(self, blocks: Rows[int]) -> None:
        self.device.zero(blocks)

    def check_device(self) -> None:
        """It works."""

    def forget(self) -> None:
        """It knows nothing of the last step."""
