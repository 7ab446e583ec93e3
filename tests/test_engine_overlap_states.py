"""Any order of events with steps in flight: what they read is what was computed, what they write nobody else reads,
and each sequence says what it says alone."""

from __future__ import annotations

from typing import Any, cast

import pytest
from headrace.worker.engine.blocks import BlockAllocator
from headrace.worker.engine.pipeline import Pipeline
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.sequence import Sequence
from headrace.worker.engine.stepper import Stepper
from headrace.worker.meter import Meter
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from kit.simulated import SimulatedRunner, sequence

BLOCK_SIZE = 4
STEMS = ([1] * 24, [1, 2] * 12, list(range(100, 124)))
STOP = 2  # one of three tokens that sequences write


def alone(new: Sequence) -> tuple[list[int], str]:
    """What a sequence writes, and how it ends."""
    last, written = hash(new.cache_seed), list[int]()
    for token in new.token_ids:
        last = hash((last, token))
    while True:
        length = len(new.token_ids) + len(written)
        if new.rid.startswith("bad") and length >= new.num_prompt_tokens + SimulatedRunner.BAD_AFTER:
            return written, "error"
        written.append(last % 3)
        if written[-1] in new.stop_ids:
            return written, "stop"
        if length + 1 == new.max_tokens:
            return written, "length"
        last = hash((last, written[-1]))


class PipelineMachine(RuleBasedStateMachine):
    """Pipeline, stepper, scheduler and prefix cache, over a device that knows what each block must hold."""

    @initialize(blocks=st.integers(9, 24), running=st.integers(1, 5), budget=st.integers(5, 20))
    def begin(self, blocks: int, running: int, budget: int) -> None:
        self.scheduler = Scheduler(BlockAllocator(blocks + 1, BLOCK_SIZE), max_running=running, max_batch_tokens=budget)
        self.runner = cast(Any, SimulatedRunner(self.scheduler))
        meter = Meter("schedule", "forward", "sample")
        stepper = Stepper(self.scheduler, self.runner, self.runner, self.runner, meter, vocab_size=200)
        self.pipeline = Pipeline(self.scheduler, stepper, meter, overlap=True)
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.written: dict[str, list[int]] = {}

    @rule(
        stem=st.sampled_from(STEMS),
        prompt=st.integers(1, 24),
        output=st.integers(1, 8),
        lane=st.sampled_from(("std", "batch")),
        kind=st.sampled_from(("good", "good", "good", "bad")),
        plain=st.sampled_from((True, True, True, False)),
        produced=st.integers(0, 2),
    )
    def add(self, stem: list[int], prompt: int, output: int, lane: Any, kind: str, plain: bool, produced: int) -> None:
        number = len(self.expected)
        before = (1,) * min(produced, output - 1)
        new = sequence(
            f"{kind} {number}",
            stem[:prompt],
            output,
            lane=lane,
            arrival=number,
            produced=before,
            stop_ids=frozenset({STOP}),
        )
        new.plain = plain
        self.expected[new.rid], self.written[new.rid] = alone(new), []
        self.scheduler.add(new)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    @precondition(lambda self: len(self.scheduler) > 0)
    @rule(which=st.integers(0, 50))
    def abort(self, which: int) -> None:
        rids = self.scheduler.rids()
        self.scheduler.remove(rids[which % len(rids)])
        self.scheduler.check_integrity()

    @rule(retract=st.booleans())
    def change_weights(self, retract: bool) -> None:
        self.pipeline.discard()
        if retract:
            self.scheduler.retract()
        else:
            self.scheduler.cache.flush()
        self.runner.device.change_weights()
        self.scheduler.check_integrity()

    def one_step(self) -> None:
        if not len(self.scheduler):
            return
        outputs = self.pipeline.step()
        assert outputs, "a step that answers for nobody"
        assert len({output.rid for output in outputs}) == len(outputs)
        for output in outputs:
            written, (expected, end) = self.written[output.rid], self.expected[output.rid]
            written += output.token_ids
            assert written == expected[: len(written)]
            if output.finish is not None:
                assert (written, output.finish.type) == (expected, end)
                assert output.rid not in self.scheduler
        self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100 * (1 + len(self.scheduler))):
            self.one_step()
        assert not len(self.scheduler), "a sequence starves"
        assert self.scheduler.blocks.num_free == self.scheduler.blocks.usable


def explore(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        PipelineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=tuple(HealthCheck),  # pyright: ignore[reportArgumentType]  # it knows no iteration of it
        ),
    )


def test_any_order_of_events() -> None:
    explore(examples=100, steps=40)


@pytest.mark.long
def test_any_order_of_very_many_events() -> None:
    explore(examples=1000, steps=100)
