"""Faults 1, 2, 10, 11, 13, 16 and 18: workers that die between any two steps, are stopped, hang, or live in another
hour. Each worker writes a letter of its own, so that a text shows who wrote what: a second writer would be seen."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import orjson
import pytest
from conftest import Server
from headrace.shared import failpoints, keys
from headrace.shared.chunks import Finish
from headrace.shared.clients import Client, connect
from headrace.shared.ids import shard_in
from headrace.shared.job_queue import JobQueue
from headrace.shared.registry import Membership, ProcessInfo, take_slot
from headrace.shared.scripts import Scripts
from kit.deployment import Deployment
from kit.faults import answer, counted, deltas, letters, stop, unfinished, until
from kit.queues import SHARDS, submit

TOKENS = 12
LEASE_S = 1.5
LEASE = ("--lease-s", str(LEASE_S))


class Roles(Deployment):
    """An api and a detokenizer that live for the module; workers come and go with a test."""

    def worker(
        self, letter: str, *, step_ms: float = 30, prefill_ms: float = 0, lease_s: float = LEASE_S, **more: Any
    ) -> subprocess.Popen[bytes]:
        lines = [{"when": "long"} | letters(letter, 40, 100), letters(letter, TOKENS, step_ms, prefill_ms)]
        return self.start("worker", *self.script_of(letter, lines), "--lease-s", str(lease_s), **more)


@pytest.fixture(scope="module")
def roles(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roles]:
    with Roles(redis_server.url, tmp_path_factory.mktemp("d"), [letters("x", TOKENS)]) as roles:
        roles.start("api")
        roles.start("detok", "--shard-lease-s", "3", *LEASE)
        first = roles.worker("x")  # it registers the model
        roles.ready()
        stop(first)
        yield roles


@pytest.fixture
def store(roles: Roles) -> Iterator[Client]:
    with connect(roles.redis_url) as client:
        yield client
        until(lambda: unfinished(client) == 0, "a request is left")


# Where the first worker dies, and how many of its tokens Redis has by then.
DEATHS = {
    "pull.send=kill": 0,
    "pull.sent=kill": 0,
    "pull.reply=kill": 0,
    "worker.waiting=kill": 0,
    "worker.claimed=kill": 0,
    "worker.admitted=kill": 0,
    "worker.step=kill@1": 0,
    "append.send=kill@1": 0,
    "append.sent=kill@1": 1,
    "append.reply=kill@1": 1,
    "append.send=kill@5": 4,
    "append.sent=kill@5": 5,
    "append.reply=kill@5": 5,
    f"append.send=kill@{TOKENS}": TOKENS - 1,
    f"append.sent=kill@{TOKENS}": TOKENS,
    f"append.reply=kill@{TOKENS}": TOKENS,
}


@pytest.mark.parametrize("spec", DEATHS)
def test_a_worker_that_dies_anywhere_is_followed_exactly(roles: Roles, store: Client, spec: str) -> None:
    first, made = roles.worker("A", failpoints=spec), DEATHS[spec]
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(answer, roles.url)
        assert first.wait(60) == -signal.SIGKILL
        second = roles.worker("B")
        assert text.result() == "A" * made + "B" * (TOKENS - made)
    stop(second)


# The other points: of a turn's beginning, of an idle worker, of a start and an end.
ELSEWHERE = ("worker.listed", "worker.registered", "worker.slot", "worker.listen", "worker.beat", "worker.obey")


@pytest.mark.parametrize("point", ELSEWHERE)
def test_a_worker_that_dies_beside_its_requests_leaves_them_whole(roles: Roles, store: Client, point: str) -> None:
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(answer, roles.url)
        until(lambda: unfinished(store) == 1, "the request does not wait")
        first = roles.worker("A", failpoints=f"{point}=kill@{1 if point in failpoints.DEAF else 2}")
        assert first.wait(60) == -signal.SIGKILL
        second = roles.worker("B")
        assert re.fullmatch("A*B*", text.result())
        assert len(text.result()) == TOKENS
    stop(second)


def test_a_worker_that_is_stopped_for_longer_than_its_lease_writes_nothing_more(roles: Roles, store: Client) -> None:
    fenced = counted(store, "fenced")
    first = roles.worker("A")
    stream = deltas(roles.url, "long")
    begun = "".join(next(stream) for _ in range(4))
    first.send_signal(signal.SIGSTOP)
    second = roles.worker("B")
    begun += next(delta for delta in stream if "B" in delta)
    first.send_signal(signal.SIGCONT)
    until(lambda: counted(store, "fenced") > fenced, "the first worker was not told that it lost the request")
    text = begun + "".join(stream)
    assert re.fullmatch("A{4,}B+", text), text
    assert len(text) == 40
    assert first.poll() is None, "it lost a request, not its life"
    stop(first, second)


def test_a_forward_that_hangs_loses_its_requests_and_no_more(roles: Roles, store: Client) -> None:
    first = roles.worker("A", failpoints=f"worker.step=stall:{4 * LEASE_S}@6")
    with ThreadPoolExecutor(1) as threads:
        text = threads.submit(answer, roles.url, "long")
        until(lambda: counted_running(store) == 1, "nobody took the request")
        second = roles.worker("B")
        assert re.fullmatch("A+B+", text.result()), text.result()
        assert len(text.result()) == 40
    stop(second)
    assert answer(roles.url) == "A" * TOKENS, "it works again"
    stop(first)


def counted_running(store: Client) -> int:
    return sum(store.xlen(keys.jobs(shard, "m", "std")) for shard in range(keys.DEFAULT_SHARDS))


def test_a_request_of_many_leases_is_never_handed_over(roles: Roles, store: Client) -> None:
    """Twenty leases, half of them before the first token."""
    takeovers = counted(store, "takeovers")
    first, second = (roles.worker("A", prefill_ms=10_000, step_ms=10_000 / TOKENS, lease_s=1) for _ in range(2))
    assert answer(roles.url) == "A" * TOKENS
    assert counted(store, "takeovers") == takeovers
    stop(first, second)


@pytest.mark.parametrize("gone", ["waiting", "prefill", "decode", "orphaned"])
def test_a_client_that_goes_at_any_moment_ends_its_request(roles: Roles, store: Client, gone: str) -> None:
    worker = None if gone == "waiting" else roles.worker("A", prefill_ms=600_000 if gone == "prefill" else 0)
    leave_when(roles.url, lambda: at(store, gone, worker))
    until(lambda: unfinished(store) == 0, "the request goes on without its client")
    assert counted_running(store) == 0
    if worker is not None:
        stop(worker)


def leave_when(url: str, moment: Callable[[], bool]) -> None:
    """Ask for a stream, and cut the connection when the moment has come."""
    host, port = url.removeprefix("http://").split(":")
    data = orjson.dumps({"model": "m", "prompt": "long", "max_tokens": 100, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nX-Resume-Grace: 0\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(moment, "the moment did not come")


def at(store: Client, gone: str, worker: subprocess.Popen[bytes] | None) -> bool:
    """Whether the one request stands where its client is to leave it."""
    rids = [rid.decode() for s in range(keys.DEFAULT_SHARDS) for rid in store.zrange(keys.active(s), 0, -1)]
    if not rids:
        return False
    state, tokens = store.hmget(keys.request(shard_in(rids[0]), rids[0]), "st", "n")
    if gone == "waiting":
        return bool(state == b"q")
    if gone == "prefill":
        return bool(state == b"run")
    if int(tokens or 0) < 3:
        return False
    if gone == "orphaned":
        assert worker is not None
        stop(worker)
    return True


def test_a_clock_that_is_an_hour_off_changes_nothing(roles: Roles, store: Client) -> None:
    takeovers = counted(store, "takeovers")
    first = roles.worker("A", clock_off_s=-3600)
    detok = roles.start("detok", "--shard-lease-s", "3", *LEASE, clock_off_s=3600)
    stream = deltas(roles.url, "long")
    begun = "".join(next(stream) for _ in range(4))
    second = roles.worker("B", clock_off_s=3600)
    with ThreadPoolExecutor(8) as threads:
        others: list[Future[str]] = [threads.submit(answer, roles.url) for _ in range(8)]
        assert all(re.fullmatch("A{12}|B{12}", other.result()) for other in others)
    assert counted(store, "takeovers") == takeovers
    first.kill()
    text = begun + "".join(stream)
    assert re.fullmatch("A{4,}B+", text), text
    stop(first, second, detok)


def test_two_hundred_restarts_leave_few_consumers(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are killed, and hold their number for a while. Last: it empties the store."""
    monkeypatch.setattr(keys, "PROCESS_TTL_MS", 40)
    with connect(redis_url) as client:
        queue = JobQueue(client, Scripts(client), SHARDS)
        for n in range(200):
            member = Membership(ProcessInfo("worker", id=f"w{n}", host="h"))
            consumer = f"h:{take_slot(client, member)}"
            (rid,) = submit(redis_url)
            claims = queue.pull("m", owner=f"w{n}", consumer=consumer, slots=10, lease_s=60)
            assert [claim.job.rid for claim in claims] == [rid]
            queue.release(f"w{n}", [(rid, 1)])
            queue.cancel([rid], Finish("abort"))
            if n % 2:
                member.leave(client)
        names = {c["name"] for s in range(SHARDS) for c in consumers(client, s)}
    assert len(names) <= 20, names


def consumers(client: Client, shard: int) -> list[dict[str, Any]]:
    stream = keys.jobs(shard, "m", "std")
    return client.xinfo_consumers(stream, keys.GROUP) if client.exists(stream) else []
