"""Batches through real processes: api, RQ driver, queue, scripted worker, detokenizer; and when they die."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import redis
from conftest import Server
from kit.batches import counts, create, line, read
from kit.deployment import Deployment, terminate
from kit.tokenizers import byte_level
from openai.types.chat import ChatCompletion

FAST = ("--batch-lease-s", "3", "--batch-window", "8", "--batch-drivers", "2", "--batch-slice-s", "2")
ENDED = ("completed", "failed", "expired", "cancelled")


def scripts() -> list[dict[str, Any]]:
    spell = byte_level().spelled
    steps = [[token] for token in spell("Grüße, 世界!")]
    return [
        {"when": "fail", "fail": "the engine broke"},
        {"when": "slow", "steps": steps, "finish": "stop", "step_ms": 20},
        {"when": "stuck", "steps": steps, "finish": "stop", "prefill_ms": 600_000},
        {"steps": steps, "finish": "stop"},
    ]


@pytest.fixture(scope="module")
def deployment(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(redis_server.url, tmp_path_factory.mktemp("d"), scripts()) as deployment:
        for role in ("worker", "detok", "api"):
            deployment.start(role)
        deployment.ready()
        yield deployment


@pytest.fixture
def driver(deployment: Deployment) -> Iterator[Driver]:
    driver = Driver(deployment)
    yield driver
    driver.kill()


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=5) as client:
        yield client


class Driver:
    """The one `headrace batch` of a test."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.start()

    def start(self) -> None:
        self.process = self._deployment.start("batch", *FAST)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_until(client: openai.OpenAI, batch_id: str, deployment: Deployment, *, completed: int | None = None) -> Any:
    """Poll until the batch has ended, or has so many lines."""
    batch = client.batches.retrieve(batch_id)
    for _ in range(1200):
        if batch.status in ENDED or (completed is not None and counts(batch)[1] >= completed):
            return batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch_id)
    raise AssertionError(f"{batch.status} {counts(batch)}\n{deployment.logs()}")


def submitted(redis_url: str) -> int:
    """How many requests the queue has accepted."""
    with redis.Redis.from_url(redis_url) as store:
        return sum(int(store.hget(key, "submitted") or 0) for key in store.keys("hr:{*}:count"))


def test_a_batch_answers_as_the_online_routes_do(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = {"model": "m", "messages": messages, "seed": 1}
    data = b"".join(
        [
            line("plain", body=chat),
            line("two", body=chat | {"n": 2}),
            line("logprobs", body=chat | {"logprobs": True, "top_logprobs": 2}),
            line("cut", body=chat | {"max_tokens": 3}),
            line("fails", "please fail"),
            line("refused", body=chat | {"temperature": -1}),
        ]
    )
    made = create(client, data)
    batch = wait_until(client, made.id, deployment)
    assert (batch.status, counts(batch), batch.model) == ("completed", (6, 4, 2), "m")
    output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    online = {
        "plain": client.chat.completions.create(**chat),
        "two": client.chat.completions.create(**chat, n=2),
        "logprobs": client.chat.completions.create(**chat, logprobs=True, top_logprobs=2),
        "cut": client.chat.completions.create(**chat, max_tokens=3),
    }
    for custom_id, answer in online.items():
        body = ChatCompletion.model_validate(output[custom_id]["response"]["body"])
        assert (body.choices, body.usage) == (answer.choices, answer.usage), custom_id
    assert online["plain"].choices[0].message.content == "Grüße, 世界!"
    assert errors["fails"]["response"]["status_code"] == 500
    assert "the engine broke" in errors["fails"]["response"]["body"]["error"]["message"]
    assert errors["refused"]["response"]["status_code"] == 400
    assert errors["refused"]["response"]["body"]["error"]["param"] == "temperature"
    assert batch.usage.total_tokens == sum(
        output[custom_id]["response"]["body"]["usage"]["total_tokens"] for custom_id in output
    )


def test_more_batches_than_drivers_all_end(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    made = [create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(20))) for _ in range(6)]
    for batch in made:
        ended = wait_until(client, batch.id, deployment)
        assert (ended.status, counts(ended)) == ("completed", (20, 20, 0))
        assert len(read(client, ended.output_file_id)) == 20


def test_a_driver_that_was_paused_writes_nothing_more(
    client: openai.OpenAI, deployment: Deployment, driver: Driver
) -> None:
    made = create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(60)))
    wait_until(client, made.id, deployment, completed=8)
    paused = driver.process
    paused.send_signal(signal.SIGSTOP)
    driver.start()
    wait_until(client, made.id, deployment, completed=30)
    paused.send_signal(signal.SIGCONT)
    batch = wait_until(client, made.id, deployment)
    paused.kill()
    assert (batch.status, counts(batch)) == ("completed", (60, 60, 0))
    assert read(client, batch.output_file_id).keys() == {f"c{i}" for i in range(60)}


@pytest.mark.long
def test_drivers_are_killed_again_and_again(
    client: openai.OpenAI, deployment: Deployment, driver: Driver, seed: int
) -> None:
    chance = random.Random(seed)
    made = [create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(200))) for _ in range(3)]
    for _ in range(10):
        time.sleep(chance.uniform(1, 6))
        driver.kill()
        driver.start()
    for batch in made:
        ended = wait_until(client, batch.id, deployment)
        assert (ended.status, counts(ended)) == ("completed", (200, 200, 0)), f"seed {seed}"
        assert read(client, ended.output_file_id).keys() == {f"c{i}" for i in range(200)}, f"seed {seed}"


def test_completions(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    url = "/v1/completions"
    data = b"".join(line(f"c{i}", url=url, body={"model": "m", "prompt": ["a", "b"]}) for i in range(3))
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = wait_until(client, made.id, deployment)
    output = read(client, batch.output_file_id)
    for record in output.values():
        choices = record["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert all("Grüße, 世界!".startswith(choice["text"]) and choice["text"] for choice in choices)
    assert (batch.status, counts(batch)) == ("completed", (3, 3, 0))


def test_the_driver_is_killed_in_the_middle(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    before = submitted(deployment.redis_url)
    made = create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(60)))
    assert wait_until(client, made.id, deployment, completed=10).status == "in_progress"
    driver.kill()
    driver.start()
    batch = wait_until(client, made.id, deployment)
    assert (batch.status, counts(batch)) == ("completed", (60, 60, 0))
    assert read(client, batch.output_file_id).keys() == {f"c{i}" for i in range(60)}
    assert submitted(deployment.redis_url) - before == 60, "no line was queued twice"


def test_the_driver_drains_on_sigterm(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    before = submitted(deployment.redis_url)
    made = create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(120)))
    wait_until(client, made.id, deployment, completed=8)
    assert terminate(driver.process) == 0
    assert client.batches.retrieve(made.id).status == "in_progress"
    driver.start()
    batch = wait_until(client, made.id, deployment)
    assert (batch.status, counts(batch)) == ("completed", (120, 120, 0))
    assert len(read(client, batch.output_file_id)) == 120
    assert submitted(deployment.redis_url) - before == 120


def test_redis_and_the_worker_are_killed_in_the_middle(
    client: openai.OpenAI, deployment: Deployment, driver: Driver, redis_server: Server
) -> None:
    worker = deployment.start("worker")
    made = create(client, b"".join(line(f"c{i}", f"slow {i}") for i in range(60)))
    wait_until(client, made.id, deployment, completed=8)
    redis_server.kill()
    redis_server.start()
    worker.kill()
    worker.wait()
    batch = wait_until(client, made.id, deployment)
    assert (batch.status, counts(batch)) == ("completed", (60, 60, 0))
    assert read(client, batch.output_file_id).keys() == {f"c{i}" for i in range(60)}


def test_cancel_frees_the_queue(client: openai.OpenAI, deployment: Deployment, driver: Driver) -> None:
    made = create(client, b"".join(line(f"c{i}", "stuck" if i >= 4 else "ok") for i in range(8)))
    wait_until(client, made.id, deployment, completed=4)
    assert client.batches.cancel(made.id).status == "cancelling"
    batch = wait_until(client, made.id, deployment)
    assert (batch.status, counts(batch)) == ("cancelled", (8, 4, 0))
    assert read(client, batch.output_file_id).keys() == {f"c{i}" for i in range(4)}
    errors = read(client, batch.error_file_id)
    assert {key: value["error"]["code"] for key, value in errors.items()} == {
        f"c{i}": "batch_cancelled" for i in range(4, 8)
    }
