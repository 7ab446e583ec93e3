"""Failpoints: every name is in the source once, the variable is read strictly, and without it nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import redis.exceptions
from headrace.shared import failpoints
from headrace.shared.errors import ConfigError
from headrace.shared.failpoints import DEAF, POINTS, SCRIPTS, VARIABLE, Failpoints, names
from headrace.shared.scripts import LUA, Call

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("api", "detok", "shared", "worker")


def test_every_point_stands_in_the_source_once() -> None:
    texts = [path.read_text() for role in ROLES for path in (ROOT / role).rglob("*.py")]
    found = Counter(name for text in texts for name in re.findall(r'(?<!def )failpoint\("([^"]+)"\)', text))
    assert found == Counter(list(POINTS))
    assert sum(text.count(' script_point("') for text in texts) == 5  # three of a flush, two of an asyncio pipeline
    assert set(POINTS) > DEAF


def test_every_script_has_points() -> None:
    assert {path.stem for path in LUA.glob("*.lua")} == {*SCRIPTS, "common"}
    assert len(names()) == len(set(names())) == 3 * len(SCRIPTS) + len(POINTS)


def test_without_the_variable_nothing_is_done() -> None:
    assert VARIABLE not in os.environ
    assert {failpoints.failpoint, failpoints.script_point} == {failpoints._nothing}


@pytest.mark.parametrize(
    ("spec", "passes"),
    [
        ("worker.beat=fail", [0, 0, 0, 0]),
        ("worker.beat=fail@2", [1, 0, 1, 1]),
        ("detok.beat=fail, worker.beat=fail@3+", [1, 1, 0, 0]),
    ],
)
def test_a_point_strikes_at_its_times(spec: str, passes: list[int]) -> None:
    points, passed = Failpoints(spec), []
    for _ in passes:
        points.hit("worker.listen")
        try:
            points.hit("worker.beat")
        except redis.exceptions.ConnectionError:
            passed.append(0)
        else:
            passed.append(1)
    assert passed == passes


def test_a_flush_passes_a_scripts_point_once() -> None:
    points = Failpoints("append.sent=fail@2")
    calls = [Call("append", 0, ()), Call("append", 1, ()), Call("sweep", 0, ())]
    points.hit_scripts("send", calls)
    points.hit_scripts("sent", calls)
    with pytest.raises(redis.exceptions.ConnectionError, match=r"append\.sent"):
        points.hit_scripts("sent", calls)


def test_a_stall_takes_its_time_and_no_more_of_it_than_it_is_told() -> None:
    points, begun = Failpoints("worker.step=stall:0.05@1"), time.monotonic()
    points.hit("worker.step")
    assert time.monotonic() - begun >= 0.05
    points.hit("worker.step")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("worker.beet=kill", "no point 'worker.beet'. There are: submit.send, .*, batch.published"),
        ("worker.beat=die", "should be NAME=kill"),
        ("worker.beat", "should be NAME=kill"),
        ("worker.beat=stall:soon", "should be NAME=kill"),
        ("worker.beat=stall:0", "should be NAME=kill"),
        ("worker.beat=kill@0", "should be NAME=kill"),
        ("worker.step=fail", "Redis is asked nothing at worker.step"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Failpoints(spec)


def run(spec: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {VARIABLE: spec}
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environment)


def test_a_role_does_not_start_with_a_name_that_is_unknown() -> None:
    done = run("nowhere=kill", "from headrace.deploy.cli import main; raise SystemExit(main(['detok']))")
    assert done.returncode == 2
    assert done.stderr.startswith("headrace detok: HEADRACE_FAILPOINTS: there is no point 'nowhere'. There are: ")
    assert done.stderr.count("\n") == 1


def test_a_kill_is_a_kill() -> None:
    done = run(
        "worker.beat=kill@2", "from headrace.shared.failpoints import failpoint as f; f('worker.beat'); print(1)"
    )
    assert (done.returncode, done.stdout) == (0, "1\n")
    done = run("worker.beat=kill", "from headrace.shared.failpoints import failpoint as f; f('worker.beat'); print(1)")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
