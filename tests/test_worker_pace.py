"""A worker's lease follows its steps."""

from __future__ import annotations

import os

import pytest
from headrace.worker.pace import MOST_LEASE_S, Pace, calm_threads


def test_short_steps_keep_the_lease() -> None:
    pace = Pace(6.0)
    for _ in range(10):
        pace.measure(0.05)
    assert pace.lease_s == 6.0


def test_a_long_step_lengthens_it_and_is_forgotten() -> None:
    pace = Pace(6.0)
    pace.measure(5.0)
    assert pace.lease_s == 20.0
    for _ in range(100):
        pace.measure(0.05)
    assert pace.lease_s == 6.0


def test_it_has_an_end() -> None:
    pace = Pace(6.0)
    pace.measure(1000.0)
    assert pace.lease_s == MOST_LEASE_S


def test_who_chose_how_threads_wait_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    calm_threads()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    calm_threads()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
