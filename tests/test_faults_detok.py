"""Fault 3: detokenizers that die between any two steps, or are stopped, while they hold back half a stop string or half
a character: each token is one byte of a text that is full of both, so that there is always something held back."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Server
from headrace.shared import failpoints, keys
from headrace.shared.clients import Client, connect
from headrace.shared.registry import processes
from kit.deployment import Deployment, terminate
from kit.faults import Reader, counted, stop, unfinished, until
from kit.tokenizers import byte_level

STOP = "<|end|>"
TEXT = "Grüße <|e, 世<|end 界 🌶<|end|"
FLAGS = ("--shard-lease-s", "1.5", "--lease-s", "3")
STREAMS = 4


@pytest.fixture(scope="module")
def roles(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    steps = [[token] for token in byte_level().spelled(TEXT + STOP + " never read")]
    with Deployment(redis_server.url, tmp_path_factory.mktemp("d"), [{"steps": steps, "step_ms": 40}]) as roles:
        roles.start("api")
        roles.start("worker", "--lease-s", "3")
        first = roles.start("detok", *FLAGS)
        roles.ready()
        stop(first)
        yield roles


@pytest.fixture
def store(roles: Deployment) -> Iterator[Client]:
    with connect(roles.redis_url) as client:
        yield client
        until(lambda: unfinished(client) == 0, "a request is left")


def text_of(url: str, n: int) -> str:
    reader = Reader({"prompt": f"stream {n}", "stop": STOP})
    reader.read(url)
    return reader.text


def leads(store: Client, detok: subprocess.Popen[bytes]) -> bool:
    """Whether this one leases every shard."""
    mine = [p for p in processes(store) if p.pid == detok.pid]
    return any(len(p.extra.get("shards", ())) == keys.DEFAULT_SHARDS for p in mine)


SPECS = [
    *(f"{script}.{place}=kill@{n}" for script in ("lease", "sweep") for place in failpoints.PLACES for n in (1, 3)),
    *(f"publish.{place}=kill@{n}" for place in failpoints.PLACES for n in (1, 5, 12)),
    *(f"{name}=kill@1" for name in failpoints.POINTS if name.startswith("detok.") and name != "detok.leave"),
    "detok.decoded=kill@9",
    *(f"detok.{name}=kill@2" for name in ("beat", "peers", "free", "look_over")),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_detokenizer_that_dies_anywhere_is_followed_exactly(roles: Deployment, store: Client, spec: str) -> None:
    first = roles.start("detok", *FLAGS, failpoints=spec)
    until(lambda: first.poll() is not None or leads(store, first), "it neither works nor dies")
    with ThreadPoolExecutor(STREAMS) as threads:
        texts = [threads.submit(text_of, roles.url, n) for n in range(STREAMS)]
        assert first.wait(60) == -signal.SIGKILL
        second = roles.start("detok", *FLAGS)
        assert [text.result() for text in texts] == [TEXT] * STREAMS
    stop(second)


def test_a_detokenizer_that_dies_while_it_leaves(roles: Deployment, store: Client) -> None:
    first = roles.start("detok", *FLAGS, failpoints="detok.leave=kill")
    until(lambda: leads(store, first), "it does not lease every shard")
    readers = [Reader({"prompt": f"stream {n}", "stop": STOP}) for n in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        reads = [threads.submit(reader.read, roles.url) for reader in readers]
        until(lambda: all(reader.text for reader in readers), "no text was published")
        status = terminate(first)
        second = roles.start("detok", *FLAGS)
        for read in reads:
            read.result()
    assert status == -signal.SIGKILL
    assert {reader.text for reader in readers} == {TEXT}
    stop(second)


def test_a_detokenizer_that_is_stopped_for_longer_than_its_lease_publishes_nothing_more(
    roles: Deployment, store: Client
) -> None:
    fenced = counted(store, "fenced")
    first = roles.start("detok", *FLAGS)
    until(lambda: leads(store, first), "it does not lease every shard")
    reader = Reader({"prompt": "stream", "stop": STOP})
    reader.read(roles.url, 4, **{"X-Resume-Grace": "20"})
    first.send_signal(signal.SIGSTOP)
    second = roles.start("detok", *FLAGS)
    reader.read(roles.url, 4, **{"X-Resume-Grace": "20"})
    first.send_signal(signal.SIGCONT)
    reader.read(roles.url)
    assert reader.text == TEXT
    assert counted(store, "fenced") >= fenced
    assert first.poll() is None
    stop(first, second)
