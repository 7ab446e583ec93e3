"""Any order of arrivals, steps, aborts, failures and flushes: no block is lost, doubled, or written to while another
reads it; what the prefix cache finds is what was computed; everything ends."""

from __future__ import annotations

import pytest
from headrace.shared.messages import LANES, Lane
from headrace.worker.engine.blocks import BlockAllocator
from headrace.worker.engine.scheduler import Scheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kit.simulated import SimulatedModel, sequence

BLOCK_SIZE = 4
LONGEST = 32  # tokens of a sequence; a pool of 9 blocks holds one, and what it may be told to keep beside

# Prompts are cut from these, so that many begin alike and part at any place.
STEMS = ([1] * 24, [1, 2] * 12, [1, 2, 1, 2, 5, 5, 5, 5] + [6] * 16, list(range(100, 124)))


class BlockMachine(RuleBasedStateMachine):
    """The allocator alone, against a plain account of who owns what."""

    @initialize(blocks=st.integers(2, 12))
    def begin(self, blocks: int) -> None:
        self.pool = BlockAllocator(blocks + 1, BLOCK_SIZE)
        self.tables: list[list[int]] = []
        self.keys: list[list[bytes]] = []
        self.held: dict[bytes, int] = {}  # what each key led to when it was last seen
        self.fresh = 0

    @rule(count=st.integers(0, 4), shared=st.integers(0, 3), like=st.integers(0, 30))
    def start(self, count: int, shared: int, like: int) -> None:
        """A table that begins with what the keys of another lead to."""
        keys = self.keys[like % len(self.keys)][:shared] if self.keys else []
        hits = []
        for key in keys:
            if (block := self.pool.find(key)) is None:
                break
            hits.append(block)
        if count > self.pool.num_free - sum(map(self.pool.is_free, hits)):
            return
        self.pool.share(hits)
        table = hits + self.pool.allocate(count)
        assert len(set(table)) == len(table)
        self.tables.append(table)
        self.fresh += 1
        parents = keys[: len(hits)]
        self.keys.append(parents + [bytes([self.fresh % 7, depth]) for depth in range(len(hits), len(table))])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 30), count=st.integers(0, 4))
    def name(self, which: int, count: int) -> None:
        table, keys = self.tables[which % len(self.tables)], self.keys[which % len(self.tables)]
        for block, key in list(zip(table, keys, strict=True))[:count]:
            self.pool.name(block, key)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 30), known=st.integers(0, 4), dirty=st.booleans())
    def end(self, which: int, known: int, dirty: bool) -> None:
        table, keys = self.tables.pop(which % len(self.tables)), self.keys.pop(which % (len(self.tables) + 1))
        self.pool.free(table, keys=keys[:known], dirty=dirty)
        named = {self.pool.find(key) for key in keys}
        assert not named & set(self.pool.dirty), "a block that can be found is zeroed"
        self.pool.dirty.clear()

    @rule()
    def forget(self) -> None:
        if self.fresh % 5 == 4:
            self.pool.forget_names()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "pool"):
            self.check()

    def check(self) -> None:
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == self.pool.usable - len({block for table in self.tables for block in table})


class SchedulerMachine(RuleBasedStateMachine):
    """Scheduler and prefix cache, with a model that knows what each block must hold."""

    @initialize(
        blocks=st.integers(9, 24),
        running=st.integers(1, 5),
        budget=st.integers(5, 20),
        ageing=st.sampled_from((3, 1000)),
        fixed_chunks=st.sampled_from((False, False, False, True)),
        speculate=st.sampled_from((0, 1, 5)),
    )
    def begin(self, blocks: int, running: int, budget: int, ageing: int, fixed_chunks: bool, speculate: int) -> None:
        self.scheduler = Scheduler(
            BlockAllocator(blocks + 1, BLOCK_SIZE),
            max_running=running,
            max_batch_tokens=budget,
            fixed_chunks=fixed_chunks,
            speculate=speculate,
            ageing=ageing,
        )
        self.model = SimulatedModel(self.scheduler)
        self.arrivals = 0
        self.parents: dict[bytes, bytes] = {}

    @rule(
        stem=st.integers(0, len(STEMS) - 1),
        prompt=st.integers(1, 24),
        output=st.integers(1, 8),
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from(("ann", "ann", "bob")),
        bad=st.sampled_from((False, False, False, True)),
        choices=st.sampled_from((1, 1, 3)),
        produced=st.integers(0, 3),
        reads_cache=st.sampled_from((True, True, True, False)),
    )
    def add(
        self,
        stem: int,
        prompt: int,
        output: int,
        lane: Lane,
        tenant: str,
        bad: bool,
        choices: int,
        produced: int,
        reads_cache: bool,
    ) -> None:
        for _ in range(choices):
            self.arrivals += 1
            new = sequence(
                f"{'bad' if bad else 'good'} {self.arrivals}",
                STEMS[stem][:prompt],
                output,
                lane=lane,
                arrival=self.arrivals,
                tenant=tenant,
                produced=(1,) * min(produced, output - 1),
                stop_ids=frozenset({2}),
            )
            new.reads_cache = reads_cache
            self.scheduler.add(new)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    @precondition(lambda self: len(self.scheduler) > 0)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        rids = self.scheduler.rids()
        self.scheduler.remove(rids[which % len(rids)])
        self.scheduler.remove("a stranger")

    @rule(retract=st.booleans())
    def flush(self, retract: bool) -> None:
        if retract:
            self.scheduler.retract()
        else:
            self.scheduler.cache.flush()
        self.model.device.change_weights()
        assert self.scheduler.blocks.num_named == 0
        self.scheduler.check_integrity()

    def one_step(self) -> None:
        bad = [rid for rid in self.scheduler.rids() if rid.startswith("bad")]
        known = [s.block_keys for s in (*self.scheduler.running, *self.scheduler._waiting)]
        self.model.step(failing=bad)
        for keys in known:
            self.parents.update(zip(keys[1:], keys, strict=False))
        blocks = self.scheduler.blocks
        for block in blocks._free:
            parent = self.parents.get(blocks._key_of.get(block, b""))
            assert parent is None or blocks.find(parent) is not None, (
                "kept, and cannot be found without what was before"
            )

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 * (1 + len(self.scheduler))):
            if not len(self.scheduler):
                break
            self.one_step()
        assert not len(self.scheduler), "a sequence starves"
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.usable


MACHINES = pytest.mark.parametrize("machine", [BlockMachine, SchedulerMachine])


def explore(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType]  # it knows no iteration of it
        ),
    )


@MACHINES
def test_any_order_of_events(machine: type[RuleBasedStateMachine]) -> None:
    explore(machine, examples=100, steps=50)


@pytest.mark.long
@MACHINES
def test_any_order_of_very_many_events(machine: type[RuleBasedStateMachine]) -> None:
    explore(machine, examples=1000, steps=100)


@given(
    lane=st.sampled_from(LANES),
    prompt=st.integers(1, 24),
    output=st.integers(1, 8),
    rival_prompt=st.integers(1, 24),
    rivals=st.integers(1, 3),
    blocks=st.integers(9, 24),
    running=st.integers(1, 4),
    budget=st.integers(4, 20),
)
@settings(max_examples=60, deadline=None)
def test_whoever_waits_is_served_though_interactive_work_never_ends(
    lane: Lane, prompt: int, output: int, rival_prompt: int, rivals: int, blocks: int, running: int, budget: int
) -> None:
    ageing = 20
    scheduler = Scheduler(
        BlockAllocator(blocks + 1, BLOCK_SIZE), max_running=running, max_batch_tokens=budget, ageing=ageing
    )
    model = SimulatedModel(scheduler)
    watched = sequence("watched", [9] * prompt, output, lane=lane, arrival=1)
    scheduler.add(watched)
    # Up to two lanes of ageing before it starts and after each time it is sent back; then those before it, one by one.
    most = 8 * ageing + 20 * (rivals + running) * (LONGEST // min(budget, 4))
    for now in range(most):
        if "watched" not in scheduler:
            break
        for number in range(rivals):
            if scheduler.free_slots() > 0 or (now % 3 == 0 and len(scheduler) < 3 * running):
                rid = f"rival {now} {number}"
                scheduler.add(sequence(rid, [now % 50] * rival_prompt, 4, lane="rt", arrival=2 + now * rivals + number))
        model.step()
    assert "watched" not in scheduler, f"not served in {most} steps"
    assert watched.num_output_tokens == output


def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones() -> None:
    scheduler = Scheduler(BlockAllocator(10, BLOCK_SIZE), max_running=4, max_batch_tokens=8)
    model = SimulatedModel(scheduler)
    for number in range(3):
        scheduler.add(sequence(f"small {number}", [number] * 3, 8, arrival=number))
    model.step()
    scheduler.add(sequence("large", [9] * 24, 8, arrival=10))  # needs eight of nine blocks
    for now in range(11, 60):
        scheduler.add(sequence(f"small {now}", [now] * 3, 8, arrival=now))
        model.step()
    assert "large" not in scheduler
