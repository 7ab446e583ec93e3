"""Blocks and scheduler: nothing lost, nothing owned twice, everything ends; no model needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from headrace.shared.messages import LANES, Lane
from headrace.worker.engine.blocks import NULL_BLOCK, BlockAllocator, OutOfBlocks
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.sequence import Sequence
from hypothesis import given
from hypothesis import strategies as st
from kit.simulated import SimulatedModel, sequence

BLOCK_SIZE = 4


def simulated(
    *, blocks: int = 64, running: int = 4, budget: int = 16, fixed_chunks: bool = False
) -> tuple[Scheduler, Callable[[], list[Slice]]]:
    """A scheduler, and what runs a step of it."""
    pool = BlockAllocator(blocks + 1, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_running=running, max_batch_tokens=budget, fixed_chunks=fixed_chunks)
    return scheduler, SimulatedModel(scheduler).step


def test_allocator_gives_all_but_the_null_block_and_takes_them_back() -> None:
    pool = BlockAllocator(5, BLOCK_SIZE)
    taken = pool.allocate(4)
    assert sorted(taken) == [1, 2, 3, 4]
    with pytest.raises(OutOfBlocks, match="1 blocks asked for, 0 of 4 free"):
        pool.allocate(1)
    pool.free(taken[:2], dirty=True)
    assert sorted(pool.dirty) == taken[:2]
    pool.check_integrity([taken[2:]])
    with pytest.raises(AssertionError, match="nobody owns"):
        pool.free(taken[:1])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_allocator_never_loses_or_doubles_a_block(moves: list[tuple[bool, int]]) -> None:
    pool = BlockAllocator(17, BLOCK_SIZE)
    tables: list[list[int]] = [[] for _ in range(4)]
    for take, count in moves:
        table = tables[count % 4]
        if take:
            try:
                table += pool.allocate(count)
            except OutOfBlocks:
                assert count > pool.num_free
        else:
            pool.free(table)
            table.clear()
        pool.check_integrity(tables)
        assert NULL_BLOCK not in {block for table in tables for block in table}


def test_decoding_sequences_share_a_step_with_a_chunk() -> None:
    s, step = simulated(budget=8)
    s.add(sequence("short", 3, 9, arrival=1))
    s.add(sequence("long", 20, 2, arrival=2))
    assert [(p.sequence.rid, p.length) for p in step()] == [("short", 3), ("long", 5)]
    assert [(p.sequence.rid, p.length) for p in step()] == [("short", 1), ("long", 7)]
    assert [(p.sequence.rid, p.length) for p in step()] == [("short", 1), ("long", 7)]
    assert [(p.sequence.rid, p.length) for p in step()] == [("short", 1), ("long", 1)]


def test_interactive_lanes_are_admitted_first() -> None:
    s, step = simulated(running=1)
    for arrival, lane in enumerate(reversed(LANES)):
        s.add(sequence(lane, 3, 1, lane=lane, arrival=arrival))
    order = []
    while len(s):
        order += [piece.sequence.rid for piece in step()]
    assert order == ["rt", "std", "batch"]


def test_an_interactive_sequence_takes_the_place_of_the_newest_of_the_batch_lane() -> None:
    s, step = simulated(running=2)
    s.add(sequence("old", 3, 9, lane="batch", arrival=1))
    s.add(sequence("new", 3, 9, lane="batch", arrival=2))
    step()
    s.add(sequence("now", 3, 1, lane="std", arrival=3))
    assert {piece.sequence.rid for piece in step()} == {"old", "now"}
    assert s.preemptions == 1
    later = step()
    assert [(p.sequence.rid, p.length) for p in later] == [("old", 1), ("new", 4)], "its token is computed again"


def test_the_newest_pays_when_blocks_run_out() -> None:
    s, step = simulated(blocks=6, running=3)
    s.add(sequence("old", 4, 20, arrival=1))
    s.add(sequence("new", 4, 1, arrival=2))  # expected to stay small, so it is admitted
    rids = [piece.sequence.rid for piece in step()]
    assert rids[0] == "old"
    while len(s):
        step()
    s.check_integrity()
    assert s.blocks.num_free == 6


def test_fixed_chunks_depend_on_the_sequence_alone() -> None:
    def lengths(others: int) -> list[int]:
        s, step = simulated(budget=8, running=8, fixed_chunks=True)
        for number in range(others):
            s.add(sequence(f"other {number}", 5, 4, arrival=number))
        watched = sequence("watched", 20, 3, arrival=99)
        watched.token_ids += [0, 0]  # produced by a worker that is gone
        s.add(watched)
        seen = []
        while len(s):
            seen += [piece.length for piece in step() if piece.sequence is watched]
        return seen

    assert lengths(0) == lengths(1) == lengths(5) == [8, 8, 4, 1, 1]


@dataclass(frozen=True)
class Arrival:
    prompt: int
    output: int
    lane: Lane
    at: int
    abort_at: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        prompt=st.integers(1, 20),
        output=st.integers(1, 12),
        lane=st.sampled_from(LANES),
        at=st.integers(0, 12),
        abort_at=st.none() | st.integers(0, 20),
    ),
    min_size=1,
    max_size=10,
)


@given(arrivals, st.integers(8, 20), st.integers(1, 4), st.booleans())
def test_everything_ends_and_every_block_comes_back(
    plan: list[Arrival], blocks: int, running: int, fixed_chunks: bool
) -> None:
    s, step = simulated(blocks=blocks, running=running, budget=6, fixed_chunks=fixed_chunks)  # 8 blocks hold one alone
    made: dict[str, Sequence] = {}
    for now in range(3000):
        for number, arrival in enumerate(plan):
            rid = str(number)
            if arrival.at == now:
                made[rid] = sequence(rid, arrival.prompt, arrival.output, lane=arrival.lane, arrival=number)
                s.add(made[rid])
            if arrival.abort_at == now:
                s.remove(rid)
        step()
        if len(s) == 0 and now > 20:
            break
    assert len(s) == 0, "a sequence starves"
    assert s.blocks.num_free == s.blocks.usable
    for number, arrival in enumerate(plan):
        if arrival.abort_at is None:
            assert made[str(number)].num_output_tokens == arrival.output
