"""`headrace top`: one picture of a deployment, for people and for scripts."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from headrace.deploy.top.sample import Sample, as_json, rates
from headrace.deploy.top.view import picture
from headrace.shared.messages import LANES, Lane
from headrace.shared.overview import COUNTERS, LaneState, Overview
from headrace.shared.registry import ProcessInfo
from kit.deployment import Deployment
from kit.serving import headrace, wait_until
from rich.console import Console

STATE = LaneState(waiting=3, running=2, oldest_s=7.5, taken_per_s=1.5)
LANE: dict[tuple[str, Lane], LaneState] = {("m", lane): STATE for lane in LANES}
QUEUE = Overview(dict.fromkeys(COUNTERS, 10), LANE, 5, 0.0, 1, 2_000_000, 7, 1, 130.0)


def sample(at: float, tokens: int, counted: int) -> Sample:
    detok = ProcessInfo("detok", id="d", state="ready", extra={"stats": {"tokens": tokens, "streams": 4}})
    api = ProcessInfo("api", id="a", state="stuck", extra={"stats": {"open_streams": 3}})
    return Sample(at, (api, detok), replace(QUEUE, counters=dict.fromkeys(COUNTERS, counted)))


def test_rates_are_what_was_done_in_between() -> None:
    before, now = sample(10.0, 100, 10), sample(14.0, 300, 12)
    assert rates(before, now)["tokens_per_s"] == 50
    assert rates(before, now)["takeovers_per_s"] == 0.5
    came = replace(now, processes=(*now.processes, ProcessInfo("detok", id="new", extra={"stats": {"tokens": 10**6}})))
    assert rates(before, came)["tokens_per_s"] == 50  # what it did before we knew it is no rate


def test_the_picture_shows_all_of_it() -> None:
    before, now = sample(10.0, 100, 10), sample(14.0, 300, 12)
    out = io.StringIO()
    Console(file=out, width=160).print(picture(before, now))
    said = out.getvalue()
    for words in ("50 tokens/s", "3 open streams", "stuck", "7.5 s", "takeovers", "0.50", "1 for 2 min"):
        assert words in said
    told = as_json(before, now)
    assert told["streams"] == {"open": 3, "decoding": 4}
    assert {lane["lane"] for lane in told["lanes"]} == set(LANES)
    assert json.loads(json.dumps(told)) == told


def test_it_reads_a_deployment_and_writes_nothing(redis_url: str, tmp_path: Path) -> None:
    nothing = headrace("top", "--once", "--redis-url", redis_url)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "no deployment" in nothing.stderr
    with Deployment(redis_url, tmp_path, [{"tokens": 4}]) as deployment:
        for role in ("worker", "detok", "api"):
            deployment.start(role)
        deployment.ready()
        body = {"model": "m", "prompt": "x", "max_tokens": 4, "n": 2}
        assert httpx.post(f"{deployment.url}/v1/completions", json=body, timeout=60).status_code == 200

        def told() -> bool:
            done = headrace("top", "--once", "--json", "--interval-s", "0.2", "--redis-url", redis_url)
            assert done.returncode == 0, done.stderr
            seen.update(json.loads(done.stdout))
            return any(process.get("tokens") == 8 for process in seen["processes"])

        seen: dict[str, list[dict[str, object]]] = {}
        wait_until(told, "the detokenizer does not tell of its tokens")
        assert sorted(str(process["role"]) for process in seen["processes"]) == ["api", "detok", "worker"]
        assert {process["state"] for process in seen["processes"]} == {"ready"}
        assert {"pool", "lane", "waiting", "oldest_s"} <= seen["lanes"][0].keys()
        text = headrace("top", "--once", "--interval-s", "0.2", "--redis-url", redis_url)
        assert "open streams" in text.stdout


def test_a_terminal_is_needed_for_the_live_view(
    redis_url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Deployment(redis_url, tmp_path, [{"tokens": 4}]) as deployment:
        deployment.start("detok")
        deployment.start("worker")
        deployment.start("api")
        deployment.ready()
        refused = headrace("top", "--redis-url", redis_url)
        assert (refused.returncode, "--once" in refused.stderr) == (2, True)
