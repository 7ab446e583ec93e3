"""Commands to a pool, over a real store: each worker gets each once, in order, and the api waits for the living."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from headrace.shared import keys
from headrace.shared.clients import Client, connect, connect_async
from headrace.shared.control import Answers, Command, ControlChannel, Inbox, Outcome, PoolState
from headrace.shared.errors import Conflict, EngineError, InvalidRequest, RequestError, Unavailable
from headrace.shared.registry import Membership, ProcessInfo, processes_async
from headrace.worker.interface import Beside
from headrace.worker.reading import Reading
from headrace.worker.updates import OURS


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with connect(redis_url) as client:
        yield client


def a_worker(client: Client, pool: str = "p", **info: Any) -> ProcessInfo:
    info.setdefault("state", "ready")
    member = Membership(ProcessInfo("worker", extra={"pool": pool}, **info))
    member.beat(client)
    return member.info


def with_channel(url: str, use: Callable[[ControlChannel], Coroutine[Any, Any, Any]]) -> Any:
    async def go() -> Any:
        client = connect_async(url)
        try:
            return await use(ControlChannel(client, lambda: processes_async(client)))
        finally:
            await client.aclose()

    return asyncio.run(go())


def tell(url: str, wait_s: float = 5, **args: Any) -> Answers:
    answers = with_channel(url, lambda channel: channel.broadcast("p", "flush_cache", args, wait_s))
    assert isinstance(answers, Answers)
    return answers


def obeying(inbox: Inbox, info: ProcessInfo, told: list[Command], stop: threading.Event) -> threading.Thread:
    """A worker that answers whatever comes."""

    def run() -> None:
        while not stop.is_set():
            for command in inbox.read():
                told.append(command)
                inbox.reply(command, Outcome(info.id, detail={"n": len(told)}))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_each_worker_gets_each_command_once_and_in_order(client: Client, redis_url: str) -> None:
    infos, stop = [a_worker(client) for _ in range(3)], threading.Event()
    told: list[list[Command]] = [[], [], []]
    threads = [
        obeying(Inbox(client, "p", info.id), info, commands, stop) for info, commands in zip(infos, told, strict=True)
    ]
    try:
        for n in range(5):
            answers = tell(redis_url, n=n)
            assert answers.ok
            assert {i: o.detail["n"] for i, o in answers.outcomes.items()} == {info.id: n + 1 for info in infos}
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [[command.args["n"] for command in commands] for commands in told] == [list(range(5))] * 3


def test_what_was_said_before_is_not_obeyed(client: Client, redis_url: str) -> None:
    early = Inbox(client, "p", a_worker(client).id)
    tell(redis_url, 0.05)
    late = Inbox(client, "p", "late")
    assert late.read() == []
    tell(redis_url, 0.05)
    assert (len(early.read()), len(late.read()), len(early.read())) == (2, 1, 0)


def test_the_silent_the_dead_and_those_that_start_are_told_apart(client: Client, redis_url: str) -> None:
    silent, dead = a_worker(client), a_worker(client)
    a_worker(client, state="starting")
    a_worker(client, pool="other")
    client.delete(keys.worker(dead.id))  # its heartbeat has run out, which is seen while the api waits
    with pytest.raises(Unavailable, match="No worker of 'q'"):
        with_channel(redis_url, lambda channel: channel.broadcast("q", "flush_cache", {}, 1))
    client.set(keys.worker(dead.id), dead.encode(), px=300)
    client.zadd(keys.WORKERS, {dead.id: 1})
    answers = tell(redis_url, 2.5)
    assert [info.id for info in answers.silent] == [silent.id]
    assert [info.id for info in answers.gone] == [dead.id]
    assert not answers.ok


def test_the_answer_of_one_that_was_not_asked_does_not_count(client: Client, redis_url: str) -> None:
    asked, stop, told = a_worker(client), threading.Event(), list[Command]()
    stranger = a_worker(client, state="starting")
    inboxes = [Inbox(client, "p", info.id) for info in (stranger, asked)]

    def run() -> None:
        while not stop.is_set():
            for command in inboxes[0].read():
                inboxes[0].reply(command, Outcome(stranger.id, 409, "came late"))
                told.extend(inboxes[1].read())
                inboxes[1].reply(command, Outcome(asked.id))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        answers = tell(redis_url)
    finally:
        stop.set()
        thread.join()
    assert answers.ok
    assert set(answers.outcomes) == {asked.id}


def test_one_change_at_a_time_and_a_dead_apis_lock_ends(client: Client, redis_url: str) -> None:
    async def twice(channel: ControlChannel) -> None:
        async with channel.exclusive("p", 60):
            with pytest.raises(Conflict, match="'p' is under way"):
                async with channel.exclusive("p", 60):
                    raise AssertionError("both have it")
            async with channel.exclusive("other", 60):
                pass
        async with channel.exclusive("p", 0.05):  # it outlasts its limit: another has it, and keeps it
            await asyncio.sleep(0.1)
            await channel.exclusive("p", 60).__aenter__()
        assert client.exists(keys.control_lock("p"))

    with_channel(redis_url, twice)


def test_the_pools_state_is_kept_for_those_that_come(client: Client) -> None:
    inbox = Inbox(client, "p", "w")
    assert inbox.state() == PoolState()
    inbox.note(weights="/w", weight_version="two")
    inbox.note(paused="retract")
    assert Inbox(client, "p", "later").state() == PoolState("/w", "two", "retract")
    inbox.note(paused="")
    assert inbox.state() == PoolState("/w", "two")
    member = Membership(ProcessInfo("worker", extra={"pool": "p"}, state="ready"))
    member.beat(client)
    inbox.leave()
    assert inbox.state() == PoolState("/w", "two")  # another is there
    assert 0 < client.pttl(keys.pool_state("p")) <= keys.POOL_STATE_TTL_MS
    member.leave(client)
    inbox.leave()
    assert inbox.state() == PoolState()


def test_the_stream_of_commands_stays_short(client: Client, redis_url: str) -> None:
    a_worker(client)
    for _ in range(3 * keys.COMMANDS_KEPT):
        client.xadd(keys.control("p"), {"c": Command("i", "flush_cache").encode()})
    tell(redis_url, 0.01)
    assert client.xlen(keys.control("p")) < 2 * keys.COMMANDS_KEPT


def test_who_comes_between_a_command_and_its_note_follows_it(client: Client) -> None:
    Inbox(client, "p", "first").note(weights="/w", weight_version="two")
    weights = {"token": "t", "limit_s": 1, "folder": "/x", "read": "read_weights", "mode": "abort", "version": "three"}
    for number, command in enumerate(
        (
            Command("1", "continue"),
            Command("2", "pause", {"mode": "retract"}),
            Command("3", "commit", {**weights, "read": "read_lora"}),
            Command("4", "commit", weights),
        )
    ):
        client.xadd(keys.control("p"), {"c": command.encode()})
        assert number < 1 or Inbox(client, "p", "late").state().paused == "retract"
    assert Inbox(client, "p", "late").state() == PoolState("/x", "three", "retract")


def test_what_was_said_long_ago_is_in_the_state_or_over(client: Client) -> None:
    client.xadd(keys.control("p"), {"c": Command("1", "pause", {"mode": "abort"}).encode()}, id="1000-0")
    assert Inbox(client, "p", "late").state() == PoolState()


def test_the_last_worker_takes_along_what_was_said(client: Client) -> None:
    inbox = Inbox(client, "p", "only")
    client.xadd(keys.control("p"), {"c": Command("1", "pause", {"mode": "abort"}).encode()})
    inbox.leave()
    assert Inbox(client, "p", "new").state() == PoolState()


@pytest.mark.parametrize(
    ("raised", "told"), [(KeyError("x"), EngineError), (InvalidRequest("no such folder"), InvalidRequest)]
)
def test_whatever_a_reader_stumbles_over_is_answered_and_the_loop_goes_on(
    raised: Exception, told: type[Exception]
) -> None:
    def read(_: Beside) -> None:
        raise raised

    reading = Reading(read, limit_s=30)
    while not reading.done():
        time.sleep(0.001)
    with pytest.raises(told):
        reading.result()
    assert issubclass(told, (RequestError, *OURS))
