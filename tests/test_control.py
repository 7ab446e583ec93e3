"""Control routes through real processes: all workers obey, one that dies or stalls is named, a later one knows."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import Server
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.shared.registry import processes
from kit.control import Control
from kit.deployment import Deployment, terminate
from kit.serving import wait_until

SCRIPTS: list[dict[str, Any]] = [{"when": "slow", "tokens": 40, "tokens_per_s": 20}, {"tokens": 5}]


@pytest.fixture(scope="module")
def deployed(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Control]:
    with Deployment(redis_server.url, tmp_path_factory.mktemp("deployment"), SCRIPTS) as deployment:
        control = Control(deployment)
        yield control
        control.http.close()


@pytest.fixture
def control(deployed: Control) -> Control:
    deployed.refill()
    return deployed


def test_every_worker_obeys_once(control: Control) -> None:
    pids = {worker.pid for worker in control.workers}
    for _ in range(3):
        answer = control.post("/flush_cache")
        assert answer["success"]
        assert {worker["pid"] for worker in answer["workers"]} == pids
        assert [worker["detail"] for worker in answer["workers"]] == [{"flushed_tokens": 0}] * 2
    info = control.http.get("/model_info").json()
    assert (info["name"], info["pool"], {w["pid"] for w in info["workers"]}) == ("m", "m", pids)


def test_what_is_paused_in_place_goes_on_where_it_was(control: Control) -> None:
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(control.generate, "slow")
        wait_until(lambda: control.running() == 1, "it runs")
        answer = control.post("/pause_generation", mode="in_place")
        assert sum(worker["detail"]["running"] for worker in answer["workers"]) == 1
        waiting = threads.submit(control.generate, "hi")
        time.sleep(4)  # longer than a lease: what is paused stays its worker's
        assert not slow.done()
        assert not waiting.done()
        control.post("/continue_generation")
        assert slow.result()["text"] == control.text(40)
        assert waiting.result()["text"] == control.text(5)
    with connect(control.deployment.redis_url) as store:
        counts = [store.hgetall(keys.counters(shard)) for shard in range(keys.DEFAULT_SHARDS)]
    assert not any(b"retries" in count or b"takeovers" in count for count in counts)


def test_a_pause_can_end_what_runs(control: Control) -> None:
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(control.aborted, "slow")
        wait_until(lambda: control.running() == 1, "it runs")
        control.post("/pause_generation")
        assert slow.result() == "Generation was paused."
    control.post("/continue_generation")
    assert control.generate()["text"] == control.text(5)


def test_a_worker_that_comes_later_is_paused_too(control: Control) -> None:
    control.post("/pause_generation")
    first, second = control.workers
    assert terminate(first) == 0  # told to stop, it does not wait for the pause to end
    control.workers = [control.start()]
    control.wait_for(2)
    assert terminate(second) == 0
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(control.generate)
        time.sleep(1.5)
        assert not answer.done()
        control.post("/continue_generation")
        assert answer.result()["text"] == control.text(5)


def test_requests_are_aborted_by_id_and_all_at_once(control: Control) -> None:
    control.post("/pause_generation")  # so that none ends by itself
    body = {"model": "m", "text": "hi", "stream": True}
    with ThreadPoolExecutor(3) as threads:
        answers = [threads.submit(control.aborted) for _ in range(3)]
        wait_until(lambda: waiting(control) == 3, "all wait")
        assert control.post("/abort_request", abort_all=True, model="m")["aborted"] == 3
        assert [answer.result() for answer in answers] == ["The request was aborted."] * 3
    control.post("/continue_generation")
    slow = body | {"text": "slow"}
    with control.http.stream("POST", "/generate", json=slow) as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: {"))
        rid = httpx.Response(200, content=next(events)[6:]).json()["meta_info"]["id"]
        assert control.post("/abort_request", rid=rid)["aborted"] == 1
        *_, last = events
    assert "The request was aborted." in last
    assert "no id of a request" in control.error("/abort_request", 400, rid="nonsense")
    assert "one of them" in control.error("/abort_request", 400)


def waiting(control: Control) -> int:
    with connect(control.deployment.redis_url) as store:
        return sum(store.zcard(keys.active(shard)) for shard in range(keys.DEFAULT_SHARDS))


def test_a_worker_that_stalls_is_named_and_obeys_late(control: Control) -> None:
    stalled = control.workers[0]
    stalled.send_signal(signal.SIGSTOP)
    message = control.error("/pause_generation", 504)
    assert f":{stalled.pid}" in message
    assert "No answer within 2 s" in message
    assert "1 of 2 workers obeyed" in message
    stalled.send_signal(signal.SIGCONT)

    def paused() -> int:
        with connect(control.deployment.redis_url) as store:
            return sum(bool(p.extra.get("paused")) for p in processes(store))

    wait_until(lambda: paused() == 2, "it obeys when it comes to it")


def test_a_worker_that_dies_with_a_command_is_named(control: Control) -> None:
    dead = control.workers[0]
    dead.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(control.error, "/flush_cache", 504)
        dead.kill()
        assert f":{dead.pid}" in answer.result()
    control.bury(dead)
    assert len(control.post("/flush_cache")["workers"]) == 1


def test_a_model_without_workers_is_said(control: Control) -> None:
    control.post("/pause_generation")
    for worker in control.workers:
        assert terminate(worker) == 0
    with connect(control.deployment.redis_url) as store:
        assert not store.exists(keys.pool_state("m"))  # a new start is a new start
    assert "No worker of 'm'" in control.error("/flush_cache", 503)
    assert "does not exist" in control.error("/flush_cache", 404, model="other")
