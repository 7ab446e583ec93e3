"""Turns at compiling: whoever takes for ever loses its turn, and nobody else does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from headrace.shared.errors import InvalidRequest, Overloaded
from headrace.worker.engine.compiling import Turns


class Compiler:
    """Compiles a word into its length; "stuck…" waits until it is let go, "bad…" is refused."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.late: dict[str, Future[int]] = {}
        self.begun: list[str] = []

    def __call__(self, word: str) -> int:
        self.begun.append(word)
        if word.startswith("stuck"):
            assert self.go.wait(30)
        if word.startswith("bad"):
            raise InvalidRequest(f"{word} is bad")
        return len(word)

    def turns(self, limit_s: float = 60, most_lost: int = 2) -> Turns[str, int]:
        def refusal(word: str) -> InvalidRequest:
            return InvalidRequest(f"{word} takes too long")

        return Turns(self, refusal, self.late.__setitem__, turns=2, limit_s=limit_s, most_lost=most_lost)


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.go.set()


def until(turns: Turns[str, int], future: Future[int]) -> None:
    limit = time.monotonic() + 30
    while not future.done():
        assert time.monotonic() < limit
        turns.expire()
        time.sleep(0.001)


def test_each_is_compiled_or_refused(compiler: Compiler) -> None:
    turns = compiler.turns()
    futures = {word: turns.submit(word) for word in ("a", "bb", "bad", "ccc", "dddd")}
    assert [futures[word].result(30) for word in ("a", "bb", "ccc", "dddd")] == [1, 2, 3, 4]
    with pytest.raises(InvalidRequest, match="bad is bad"):
        futures["bad"].result(30)


def test_those_that_never_end_lose_their_turns(compiler: Compiler) -> None:
    turns = compiler.turns(limit_s=0.02)
    stuck = [turns.submit(f"stuck {n}") for n in range(2)]
    behind = turns.submit("behind")
    for future in stuck:
        until(turns, future)
        with pytest.raises(InvalidRequest, match="takes too long"):
            future.result()
    assert behind.result(30) == 6


def test_who_waits_for_a_turn_has_all_its_time_still(compiler: Compiler) -> None:
    turns = compiler.turns(limit_s=0.02, most_lost=9)
    for n in range(2):
        turns.submit(f"stuck {n}")
    behind = turns.submit("stuck behind")
    time.sleep(0.05)
    assert compiler.begun == ["stuck 0", "stuck 1"]
    turns.expire()
    assert not behind.done()
    until(turns, behind)
    assert "stuck behind" in compiler.begun


def test_too_many_that_never_end_close_the_door_until_one_ends(compiler: Compiler) -> None:
    turns = compiler.turns(limit_s=0.02)
    stuck = [turns.submit(f"stuck {n}") for n in range(2)]
    for future in stuck:
        until(turns, future)
    with pytest.raises(Overloaded):
        turns.submit("new").result(0)
    compiler.go.set()
    limit = time.monotonic() + 30
    while len(compiler.late) < 2:
        assert time.monotonic() < limit
        time.sleep(0.001)
    assert compiler.late["stuck 0"].result(0) == 7
    assert turns.submit("new").result(30) == 3
