"""Recorded launches: nothing runs while they are recorded, and then they give what launches one by one give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from headrace.kernels.cpu import linear, norm
from headrace.kernels.cpu.large import LARGE
from headrace.kernels.cpu.program import Memory, Program

DEPTH = 40


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def chain(x: torch.Tensor, panels: torch.Tensor, scale: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
    for _ in range(DEPTH):
        if memory is not None:
            memory.turn()
        x = linear.linear(norm.rms_norm(x, scale, 1e-6), panels, x.shape[1], residual=x)
    return x


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_program_gives_what_its_launches_gave_however_often_it_runs(threads: int) -> None:
    torch.set_num_threads(threads)
    panels, scale, memory = linear.pack(torch.randn(96, 96).bfloat16() / 8), torch.randn(96), Memory(8)
    programs = {}
    for rows in (3, 8, 1):
        x, program = torch.full((rows, 96), torch.nan), Program(memory)
        with program.record():
            out = chain(x, panels, scale, memory)
        programs[rows] = x, program, out
    for rows in (1, 8, 3, 3, 1, 8):
        x, program, out = programs[rows]
        numbers = torch.randn(rows, 96)
        x.copy_(numbers)
        program.run()
        assert torch.equal(out, chain(numbers, panels, scale))


def test_nothing_runs_while_it_is_recorded_and_a_failure_ends_the_recording() -> None:
    panels, x = linear.pack(torch.eye(16)), torch.ones(1, 16)
    program = Program(Memory(1))
    with program.record():
        out = linear.linear(x, panels, 16).fill_(7)
    assert bool((out == 7).all())
    program.run()
    assert torch.equal(out, x)
    with pytest.raises(ZeroDivisionError), Program(Memory(1)).record():
        raise ZeroDivisionError
    assert torch.equal(linear.linear(x, panels, 16), x)


def test_memory_has_two_halves_that_are_used_again() -> None:
    memory, places = Memory(4), []
    for _ in range(4):
        memory.turn()
        places.append([memory.empty(2, 3).data_ptr(), memory.empty(4, 5, 2).data_ptr()])
    assert places[0] == places[2]
    assert places[1] == places[3]
    assert len({*places[0], *places[1]}) == 4


def test_a_large_output_takes_the_memory_of_the_last_one_once_nobody_holds_that() -> None:
    def ask() -> torch.Tensor:
        return linear.linear(x, panels, len(weight))

    x, weight = torch.randn(9, 32), torch.randn(LARGE // 8, 32)
    panels, wanted = linear.pack(weight), x @ weight.T
    first = ask()
    place, row = first.data_ptr(), first[3:4]
    second = ask()
    assert second.data_ptr() != place, "the first one is held"
    del first
    third = ask()
    assert third.data_ptr() != place, "a row of the first one is held"
    torch.testing.assert_close(row, wanted[3:4])
    del row
    fourth = ask()
    assert fourth.data_ptr() == place
    for out in (second, third, fourth):
        torch.testing.assert_close(out, wanted)
