"""Fault 4: api replicas that die, or lose Redis, between any two steps: one request and not two, streams that go on
elsewhere, orphans that end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from conftest import Server
from headrace.shared.clients import Client, connect
from kit.deployment import Deployment
from kit.faults import Reader, Refused, Replica, counted, stop, unfinished, until
from kit.tokenizers import byte_level

TEXT = "Grüße, 世界! 🌶 and a little more than that"
STREAMS = 100


@pytest.fixture(scope="module")
def roles(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    steps = [[token] for token in byte_level().spelled(TEXT)]
    scripts: list[dict[str, Any]] = [
        {"when": "endless", "tokens": 400, "tokens_per_s": 2},
        {"when": "slowest", "steps": steps, "step_ms": 180},
        {"when": "slow", "steps": steps, "step_ms": 60},
        {"steps": steps, "step_ms": 5},
    ]
    with Deployment(redis_server.url, tmp_path_factory.mktemp("d"), scripts) as roles:
        for role in ("api", "worker", "detok"):
            roles.start(role)
        roles.ready()
        yield roles


@pytest.fixture
def store(roles: Deployment) -> Iterator[Client]:
    with connect(roles.redis_url) as client:
        yield client
        until(lambda: unfinished(client) == 0, "a request is left")


def ask(url: str, prompt: str = "go", key: str = "") -> httpx.Response:
    """A whole answer."""
    headers = {"Idempotency-Key": key} if key else {}
    body = {"model": "m", "prompt": prompt, "max_tokens": 400}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, verify=False, trust_env=False)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("spec", ["submit.send=kill", "submit.reply=kill", "api.accepted=kill"])
def test_a_named_request_is_one_however_often_it_is_sent(roles: Deployment, store: Client, spec: str) -> None:
    before = counted(store, "submitted")
    with suppress(httpx.TransportError):
        ask(Replica(roles, failpoints=spec).url, key=spec)
    assert [text_of(ask(roles.url, key=spec)) for _ in range(2)] == [TEXT] * 2
    assert counted(store, "submitted") == before + 1
    assert text_of(ask(roles.url, prompt="another", key=spec)) == TEXT
    assert counted(store, "submitted") == before + 2, "another body is another request"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_request_lives_on_after_a_replica_that_never_heard_of_its_submit(
    roles: Deployment, store: Client, stream: bool
) -> None:
    """The replica gives up, and its client asks another: the request must not be ended behind its back."""
    replica = Replica(roles, failpoints="submit.reply=fail")
    if stream:
        reader = Reader({"prompt": "slowest"}, key="unheard")
        reader.persist([replica.url, roles.url])
        assert reader.text == TEXT
    else:
        assert ask(replica.url, "slowest", key="heard not").status_code == 503
        assert text_of(ask(roles.url, "slowest", key="heard not")) == TEXT
    stop(replica.process)


def test_a_named_stream_goes_on_where_it_is_asked_for_again(roles: Deployment, store: Client) -> None:
    before, first = counted(store, "submitted"), Replica(roles)
    reader, again = Reader({"prompt": "slow"}), Reader({"prompt": "slow"})
    reader.read(first.url, 5, **{"Idempotency-Key": "k", "X-Resume-Grace": "20"})
    stop(first.process)
    again.read(roles.url, float("inf"), **{"Idempotency-Key": "k"})
    assert again.text == TEXT
    assert again.text.startswith(reader.text)
    assert counted(store, "submitted") == before + 1


@pytest.mark.parametrize("spec", ["submit.reply=kill", "api.accepted=kill"])
def test_a_request_whose_replica_died_ends_with_its_reader_lease(roles: Deployment, store: Client, spec: str) -> None:
    with suppress(httpx.TransportError):
        ask(Replica(roles, "--reader-lease-s", "1", failpoints=spec).url, "endless")
    assert unfinished(store) == 1
    until(lambda: unfinished(store) == 0, "the orphan goes on")


def test_a_hundred_streams_go_on_through_another_replica(roles: Deployment, store: Client) -> None:
    first, second = Replica(roles), Replica(roles)
    readers = [Reader({"prompt": f"slow {n}"}) for n in range(STREAMS)]

    def follow(reader: Reader) -> str:
        with suppress(httpx.TransportError):
            reader.read(first.url)
        if not reader.ended:
            reader.read(second.url)
        return reader.text

    with ThreadPoolExecutor(STREAMS) as threads:
        texts = [threads.submit(follow, reader) for reader in readers]
        until(lambda: all(reader.text for reader in readers), "a stream does not begin")
        assert not any(reader.ended for reader in readers)
        first.process.send_signal(signal.SIGKILL)
        assert [text.result() for text in texts] == [TEXT] * STREAMS
    stop(second.process)


SPECS = [
    "submit.send=fail@1",
    "submit.reply=fail@1",
    "touch.send=fail@1",
    "touch.reply=fail@1",
    "api.repair=fail@1",
    "api.subscribe=fail@1",
    "api.keep=fail@1",
    "api.beat=fail@1",
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_replica_that_loses_redis_for_a_moment_serves_on(roles: Deployment, store: Client, spec: str) -> None:
    replica = Replica(roles, "--reader-lease-s", "2", failpoints=spec)
    reader = Reader({"prompt": "slow"})
    reader.read(replica.url, 5, **{"X-Resume-Grace": "20"})
    reader.read(replica.url)
    assert reader.text == TEXT
    stop(replica.process)


@pytest.mark.parametrize("spec", ["api.plan=fail@1", "api.resume=fail@1"])
def test_a_stream_that_cannot_be_gone_on_with_now_can_be_later(roles: Deployment, store: Client, spec: str) -> None:
    replica, reader = Replica(roles, failpoints=spec), Reader({"prompt": "slow"})
    reader.read(roles.url, 5, **{"X-Resume-Grace": "20"})
    with pytest.raises(Refused) as refused:
        reader.read(replica.url)
    assert refused.value.status == 503
    reader.read(replica.url)
    assert reader.text == TEXT
    stop(replica.process)


def test_the_memory_that_cannot_be_read_is_an_answer(roles: Deployment, store: Client) -> None:
    replica = Replica(roles, failpoints="api.memory=fail@1")
    assert ask(replica.url).status_code == 503
    assert text_of(ask(replica.url)) == TEXT
    stop(replica.process)


@pytest.mark.parametrize("spec", ["api.leave=fail", "touch.send=kill@1"])
def test_a_client_that_goes_unheard_ends_with_its_reader_lease(roles: Deployment, store: Client, spec: str) -> None:
    replica = Replica(roles, "--reader-lease-s", "1", failpoints=spec)
    with suppress(httpx.TransportError):
        Reader({"prompt": "endless"}).read(replica.url, 2, **{"X-Resume-Grace": "1"})
    until(lambda: unfinished(store) == 0, "the request goes on without its client")
    stop(replica.process)
