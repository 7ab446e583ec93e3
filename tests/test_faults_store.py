"""Faults 5, 6, 14 and 15: a Redis that is killed, cut, emptied, paused or full under open streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Server
from headrace.deploy.cli import EXIT_STORE
from headrace.shared import keys, store
from headrace.shared.clients import Client, connect
from headrace.shared.errors import StoreRefused
from headrace.shared.messages import LANES
from kit.deployment import Deployment
from kit.faults import Reader, Refused, Replica, letters, stop, unfinished, until
from kit.tokenizers import byte_level

TEXT = "Grüße <|e, 世界! 🌶 <|end and a little more than that"
STREAMS = 6
LOG_LINES = 150  # of all processes, for one fault: a loop that logs makes thousands
FLAGS = {"worker": ("--lease-s", "2"), "detok": ("--lease-s", "2", "--shard-lease-s", "2")}


@pytest.fixture
def roles(redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    steps = [[token] for token in byte_level().spelled(TEXT)]
    with Deployment(redis_url, tmp_path, [{"steps": steps, "finish": "stop", "step_ms": 60}]) as roles:
        for role in ("worker", "detok", "detok", "api"):
            roles.start(role, *FLAGS.get(role, ()))
        roles.ready()
        yield roles


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with connect(redis_url) as client:
        yield client


def destroy_groups(server: Server, client: Client) -> None:
    for stream in (keys.jobs(shard, "m", lane) for shard in range(keys.DEFAULT_SHARDS) for lane in LANES):
        if client.exists(stream):
            client.xgroup_destroy(stream, keys.GROUP)


def kill_clients(server: Server, client: Client) -> None:
    for kind in ("normal", "pubsub"):
        client.client_kill_filter(_type=kind, skipme=True)


def restart(server: Server, client: Client) -> None:
    server.kill()
    time.sleep(0.5)
    server.start()


FAULTS: dict[str, Callable[[Server, Client], Any]] = {
    "scripts": lambda server, client: client.script_flush(),
    "groups": destroy_groups,
    "clients": kill_clients,
    "pause": lambda server, client: client.client_pause(1500),
    "sleep": lambda server, client: client.execute_command("DEBUG", "SLEEP", 1.5),
    "killed": restart,
}


def begun(readers: list[Reader]) -> None:
    until(lambda: all(len(reader.text) > 5 for reader in readers), "a stream does not begin")


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_outlive_what_befalls_their_store(
    roles: Deployment, redis_server: Server, client: Client, fault: str
) -> None:
    readers = [Reader({"prompt": f"stream {n}"}) for n in range(STREAMS)]
    lines = len(roles.logs().splitlines())
    with ThreadPoolExecutor(STREAMS) as threads:
        reads = [threads.submit(reader.persist, [roles.url]) for reader in readers]
        begun(readers)
        with suppress(ConnectionError):
            FAULTS[fault](redis_server, client)
        for read in reads:
            read.result()
    assert {(r.text, r.finish, r.completion_tokens) for r in readers} == {(TEXT, "stop", len(TEXT.encode()))}
    assert len(roles.logs().splitlines()) - lines < LOG_LINES, roles.logs()
    until(lambda: unfinished(client) == 0, "a request is left")


def test_a_worker_that_comes_after_the_groups_are_gone_serves(
    roles: Deployment, redis_server: Server, client: Client
) -> None:
    Reader({"prompt": "before"}).persist([roles.url])
    destroy_groups(redis_server, client)
    worker = roles.start("worker", *FLAGS["worker"])
    readers = [Reader({"prompt": f"after {n}"}) for n in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        list(threads.map(lambda reader: reader.persist([roles.url]), readers))
    assert {reader.text for reader in readers} == {TEXT}
    assert worker.poll() is None, roles.logs()


def test_a_store_that_was_emptied_is_said_to_each_client_and_filled_again(roles: Deployment, client: Client) -> None:
    readers = [Reader({"prompt": f"stream {n}"}) for n in range(STREAMS)]
    lines = len(roles.logs().splitlines())

    def refusal(reader: Reader) -> Refused:
        with pytest.raises(Refused) as refused:
            reader.read(roles.url)
        return refused.value

    with ThreadPoolExecutor(STREAMS + 1) as threads:
        refusals = [threads.submit(refusal, reader) for reader in readers]
        whole = threads.submit(ask_whole, roles.url)
        begun(readers)
        client.flushall()
        assert {refused.result().code for refused in refusals} <= {"stream_gone", "stream_lost"}
        assert whole.result() == TEXT, "what nobody has seen is submitted again"
    again = Reader({"prompt": "again"})
    again.persist([roles.url])
    assert again.text == TEXT
    assert len(roles.logs().splitlines()) - lines < LOG_LINES, roles.logs()


def ask_whole(url: str) -> str:
    body = {"model": "m", "prompt": "whole", "max_tokens": 400}
    for _ in range(40):
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=90)
        if answer.status_code == 200:
            return str(answer.json()["choices"][0]["text"])
        assert answer.status_code == 503, answer.text
        time.sleep(0.5)
    raise AssertionError("not answered")


def append_only_file(server: Server) -> Path:
    return sorted((server.folder / "appendonlydir").glob("*.incr.aof"))[-1]


@pytest.mark.parametrize("kept", [0.0, 0.4, 0.8])
def test_a_store_that_lost_its_tail_splices_no_stream(
    roles: Deployment, redis_server: Server, client: Client, kept: float, tmp_path: Path
) -> None:
    """The worker that goes on writes other letters than the first one did: what a client has read, over all of its
    connections, is what the stream says from its start, or the client is told that it is not."""
    other = roles.script_of("B", [letters("B", 60, 60)])
    file, second = append_only_file(redis_server), Replica(roles)
    size = file.stat().st_size
    readers = [Reader({"prompt": f"stream {n}"}) for n in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as threads:
        reads = [threads.submit(reader.persist, [roles.url, second.url]) for reader in readers]
        begun(readers)
        time.sleep(0.5)
        redis_server.kill()
        stop(*[process for role, process in roles.running if role == "worker"])
        written = file.stat().st_size - size
        with file.open("r+b") as f:
            f.truncate(size + int(kept * written))
        redis_server.start()
        roles.start("worker", *other, *FLAGS["worker"])
        told = [read.exception() for read in reads]
    for reader, error in zip(readers, told, strict=True):
        if error is None:
            assert reader.text == from_its_start(roles.url, reader.request)
        else:
            assert isinstance(error, Refused), error
            assert error.code in ("stream_lost", "stream_gone")
    assert any(told), "nothing was lost: this shows nothing"
    until(lambda: unfinished(client) == 0, "a request is left")


def from_its_start(url: str, name: str) -> str:
    """What a stream says to somebody who has nothing of it."""
    reader = Reader({})
    with httpx.stream("GET", f"{url}/v1/streams/{name}", timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                reader.take(line.removeprefix("data: "))
    return reader.text


def test_a_full_store_refuses_at_the_door_and_streams_go_on(roles: Deployment, client: Client) -> None:
    reader, limit = Reader({"prompt": "running"}), client.config_get("maxmemory")["maxmemory"]
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(reader.read, roles.url)
        begun([reader])
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(Refused) as refused:
                Reader({"prompt": "one more"}).read(roles.url)
            read.result()
        finally:
            client.config_set("maxmemory", limit)
    assert (refused.value.status, refused.value.code) == (429, "memory_full")
    assert reader.text == TEXT
    reader = Reader({"prompt": "afterwards"})
    reader.read(roles.url)
    assert reader.text == TEXT


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"redis_version": "6.2.14"}, "redis 6.2.14 is too old: "),
        ({"redis_version": "7.2.4", "valkey_version": "7.1.9"}, "valkey 7.1.9 is too old: "),
    ],
)
def test_a_store_that_is_too_old_is_refused(info: dict[str, str], reason: str) -> None:
    with pytest.raises(StoreRefused, match=reason):
        store._check_version(info)


def test_a_store_that_evicts_is_refused_by_each_role(redis_url: str, tmp_path: Path) -> None:
    with connect(redis_url) as client, Deployment(redis_url, tmp_path, [{"tokens": 1}]) as roles:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            for role in ("api", "worker", "detok", "batch"):
                assert roles.start(role).wait(60) == 2
        finally:
            client.config_set("maxmemory-policy", "noeviction")
        assert roles.logs().count("Redis evicts keys (maxmemory-policy allkeys-lru)") == 4


@pytest.mark.parametrize("role", ["worker", "detok"])
def test_a_store_that_goes_away_while_a_role_starts_is_a_line(redis_server: Server, tmp_path: Path, role: str) -> None:
    with Deployment(redis_server.url, tmp_path, [letters("a", 1)]) as roles, connect(redis_server.url) as store:
        store.delete(keys.WORKERS)  # of those who were killed before
        process = roles.start(role, failpoints=f"{role}.listed=stall:3")
        until(lambda: store.zcard(keys.WORKERS), "it is not listed")
        redis_server.kill()
        try:
            assert process.wait(60) == EXIT_STORE
        finally:
            redis_server.start()
        said = roles.logs()
        assert f"headrace {role}: Redis went away" in said
        assert "Traceback" not in said
