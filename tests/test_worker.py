"""Workers that die, stall, drain and meet poison, as real processes. The scripted worker makes every text exact."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from headrace.shared import keys
from headrace.shared.clients import connect
from headrace.shared.registry import processes
from headrace.worker.scripted import LOAD_TEXT
from kit.deployment import Deployment, terminate
from openai import InternalServerError, OpenAI

SHARDS = keys.DEFAULT_SHARDS
LEASE = ("--lease-s", "3")
SCRIPTS: list[dict[str, Any]] = [
    {"when": "slow", "tokens": 60, "tokens_per_s": 20},
    {"when": "poison", "die_at": 0, "tokens": 5},
    {"when": "dies at seven", "die_at": 7, "tokens": 30, "step_ms": 5},
    {"when": "fails", "fail": "it broke"},
    {"tokens": 20},
]


@pytest.fixture
def deployment(redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(redis_url, tmp_path, SCRIPTS) as deployment:
        deployment.start("api")
        deployment.start("detok", "--shard-lease-s", "3")
        yield deployment


@pytest.fixture
def client(deployment: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


def register(deployment: Deployment) -> subprocess.Popen[bytes]:
    """A worker that is ready, and with it the model."""
    worker = deployment.start("worker", *LEASE)
    deployment.ready()
    return worker


def chat(client: OpenAI, content: str, stream: bool = False) -> Any:
    create: Any = client.chat.completions.create
    return create(model="m", messages=[{"role": "user", "content": content}], max_tokens=100, stream=stream)


def ask(client: OpenAI, content: str) -> str:
    return str(chat(client, content).choices[0].message.content)


def text_of(deployment: Deployment, tokens: int) -> str:
    """What a scripted line of so many tokens says."""
    ids = deployment.tokenizer.tokenizer.encode(LOAD_TEXT, add_special_tokens=False).ids
    return str(deployment.tokenizer.tokenizer.decode([ids[i % len(ids)] for i in range(tokens)]))


def first_deltas(client: OpenAI, content: str, count: int) -> tuple[Iterator[str], str]:
    """A stream of which `count` deltas were read: the rest, and what was read."""
    stream = chat(client, content, stream=True)
    deltas = (chunk.choices[0].delta.content or "" for chunk in stream)
    return deltas, "".join(next(deltas) for _ in range(count))


def nothing_left(deployment: Deployment) -> bool:
    """No job, pending entry or unfinished request is left in the store."""
    with connect(deployment.redis_url) as store:
        for shard in range(SHARDS):
            if store.zcard(keys.active(shard)):
                return False
            for stream in (keys.jobs(shard, "m", lane) for lane in ("rt", "std", "batch")):
                if store.xlen(stream) or (store.exists(stream) and store.xpending(stream, keys.GROUP)["pending"]):
                    return False
    return True


def test_a_stream_survives_the_death_of_its_worker(deployment: Deployment, client: OpenAI) -> None:
    first = register(deployment)
    rest, begun = first_deltas(client, "slow", 5)
    deployment.start("worker", *LEASE)
    first.kill()
    assert begun + "".join(rest) == text_of(deployment, 60)
    assert nothing_left(deployment)


def test_a_stalled_worker_is_fenced_and_lets_go(deployment: Deployment, client: OpenAI) -> None:
    first = register(deployment)
    rest, begun = first_deltas(client, "slow", 5)
    deployment.start("worker", *LEASE)
    first.send_signal(signal.SIGSTOP)
    text = begun + "".join(rest)
    first.send_signal(signal.SIGCONT)
    assert text == text_of(deployment, 60)
    assert ask(client, "and the stalled one works again") == text_of(deployment, 20)
    assert terminate(first) == 0
    assert nothing_left(deployment)


def test_a_draining_worker_hands_over_and_loses_nothing(deployment: Deployment, client: OpenAI) -> None:
    first = deployment.start("worker", "--drain-s", "0", *LEASE)
    deployment.ready()
    rest, begun = first_deltas(client, "slow", 5)
    deployment.start("worker", *LEASE)
    assert terminate(first) == 0
    assert begun + "".join(rest) == text_of(deployment, 60)
    with connect(deployment.redis_url) as store:
        retries = sum(int(store.hget(keys.counters(shard), "retries") or 0) for shard in range(SHARDS))
    assert retries == 0


def until_answered(deployment: Deployment, answer: Future[str]) -> int:
    """Keep one worker alive until the answer is there; returns how many died."""
    workers = [deployment.start("worker", *LEASE)]
    while not answer.done():
        if workers[-1].poll() is not None:
            workers.append(deployment.start("worker", *LEASE))
        time.sleep(0.1)
    return sum(worker.poll() == -signal.SIGKILL for worker in workers)


def test_poison_is_given_up_and_its_neighbours_finish(deployment: Deployment, client: OpenAI) -> None:
    assert terminate(register(deployment)) == 0
    with ThreadPoolExecutor(32) as threads:
        bad = threads.submit(ask, client, "poison")
        good = [threads.submit(ask, client, f"good {i}") for i in range(31)]
        assert until_answered(deployment, bad) == keys.MAX_ATTEMPTS
        with pytest.raises(InternalServerError, match="given up"):
            bad.result()
        assert {answer.result() for answer in good} == {text_of(deployment, 20)}
    assert nothing_left(deployment)


def test_a_request_that_dies_at_one_token_for_ever_is_given_up(deployment: Deployment, client: OpenAI) -> None:
    """The first death published seven tokens and is not charged; the next three published none."""
    assert terminate(register(deployment)) == 0
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(ask, client, "dies at seven")
        assert until_answered(deployment, answer) == 1 + keys.MAX_ATTEMPTS
        with pytest.raises(InternalServerError, match="given up"):
            answer.result()


def test_an_error_of_the_worker_reaches_the_client(deployment: Deployment, client: OpenAI) -> None:
    register(deployment)
    with pytest.raises(InternalServerError, match="it broke"):
        ask(client, "fails")


def test_a_client_that_goes_away_frees_its_worker(deployment: Deployment, client: OpenAI) -> None:
    register(deployment)
    body = {"model": "m", "messages": [{"role": "user", "content": "slow"}], "stream": True, "max_tokens": 100}
    headers = {"X-Resume-Grace": "0"}
    with httpx.stream("POST", f"{deployment.url}/v1/chat/completions", json=body, headers=headers) as response:
        next(response.iter_lines())
    with connect(deployment.redis_url) as store:
        for _ in range(200):
            if nothing_left(deployment):
                break
            time.sleep(0.05)
        assert nothing_left(deployment)
        workers = [p for p in processes(store) if p.role == "worker"]
    assert [w.state for w in workers] == ["ready"]
    assert "ERROR" not in deployment.logs()


def test_jobs_that_wait_for_a_worker_are_served(deployment: Deployment, client: OpenAI) -> None:
    assert terminate(register(deployment)) == 0
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(ask, client, str(i)) for i in range(4)]
        deployment.start("worker", *LEASE)
        assert {answer.result() for answer in answers} == {text_of(deployment, 20)}
