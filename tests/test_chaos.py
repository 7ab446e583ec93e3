"""A deployment under seeded faults with clients of every kind: every answer is exact, and nothing is left.

The seed of a run stands in pytest's header; HEADRACE_TEST_SEED repeats it. `make test` runs a minute with a new seed
each time, `make long` many and writes them into docs/long-runs.md, `make chaos SEED=… SECONDS=…` one. What kind of run
it is follows from the seed, too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import a_server_binary
from kit.chaos import Chaos

ROUNDS = 300


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))  # short: a socket's path has 107 characters at most
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def survive(folder: Path, seed: int, seconds: float) -> None:
    chaos = Chaos(a_server_binary(), folder, seed, seconds)
    chaos.run()
    assert chaos.problems == [], f"seed {seed}, {chaos.kind}, {chaos.tally}"
    assert all(chaos.tally[kind] for kind in ("streams", "whole answers", "batches", "left")), chaos.tally


@pytest.mark.timeout(700)
def test_a_minute_of_faults(folder: Path, seed: int) -> None:
    survive(folder, seed, 60)


@pytest.mark.long
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_many_rounds_of_faults(folder: Path, seed: int, round_: int) -> None:
    """Of every kind in turn: see `Chaos`."""
    survive(folder, seed + round_, 30)
