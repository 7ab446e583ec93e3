"""Fault 7: a script whose connection is lost before it is sent, before its reply or after it; and a Redis that sleeps
for longer than its client waits. In each case the script is sent again, and Redis then holds what one call leaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from conftest import Server
from headrace.shared import connections, scripts
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import Finish
from headrace.shared.clients import connect_async
from headrace.shared.failpoints import PLACES, SCRIPTS, Failpoints
from headrace.shared.ids import family_from, shard_in
from headrace.shared.token_stream import Append
from kit.queues import SHARDS, Rig, a_job, chunk

LENGTH = Finish("length")
READER_S = 600.0


def asked(url: str, ask: Callable[[AsyncJobQueue], Any]) -> Any:
    """A call of the api's side."""

    async def go() -> Any:
        client = connect_async(url)
        try:
            await client.ping()  # it is connected, so that the script is what goes wrong
            return await ask(AsyncJobQueue(client, SHARDS))
        finally:
            await client.aclose()

    return asyncio.run(go())


@dataclass(frozen=True)
class Case:
    """What stands before a script, and the script: each is given the request's rid."""

    call: Callable[[Rig, str], Any]
    before: Callable[[Rig, str], Any] = lambda rig, rid: None
    asyncio: bool = False


def claim(rig: Rig, rid: str) -> None:
    assert [c.job.rid for c in rig.pull()] == [rid]


def pull(rig: Rig, rid: str) -> None:
    """What a lost reply had claimed is given back, and comes again."""
    claims = rig.pull()
    while not claims:
        assert rig.queue.recover("m", owner="w1", consumer="host:w1", held=[]) == 1
        claims = rig.pull()
    assert [c.job.rid for c in claims] == [rid]


def generate(rig: Rig, rid: str) -> None:
    claim(rig, rid)
    rig.tokens().append([Append(1, chunk(rid, 0, 5, 6, finish=LENGTH))])


def lose(rig: Rig, rid: str) -> None:
    claim(rig, rid)
    rig.expire_lease(rid)


def submit(rig: Rig, rid: str) -> None:
    job = replace(a_job(), rid=family_from("second", SHARDS))
    asked(rig.url, lambda queue: queue.submit(job, n=2, deadline_s=60, reader_lease_s=None, keep_s=30))


CASES = {
    "submit": Case(submit, asyncio=True),
    "pull": Case(pull),
    "append": Case(lambda rig, rid: rig.tokens().append([Append(1, chunk(rid, 0, 5, 6))]), claim),
    "release": Case(lambda rig, rid: rig.queue.release("w1", [(rid, 1)]), claim),
    "cancel": Case(lambda rig, rid: rig.queue.cancel([rid], Finish("abort"))),
    "touch": Case(
        lambda rig, rid: asked(rig.url, lambda queue: queue.touch([rid], reader_lease_s=READER_S, reader="me")),
        asyncio=True,
    ),
    "lease": Case(lambda rig, rid: rig.lease.take([shard_in(rid)])),
    "publish": Case(lambda rig, rid: rig.publish_end(rid, 2), generate),
    "sweep": Case(lambda rig, rid: rig.sweep(), lose),
    "overview": Case(lambda rig, rid: asked(rig.url, lambda queue: queue.overview(["m"])), asyncio=True),
}


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.client.close()


def prepared(rig: Rig, case: Case) -> str:
    (rid,) = rig.submit(rid=family_from("first", SHARDS))
    case.before(rig, rid)
    return rid


def contents(rig: Rig) -> dict[str, Any]:
    """All that Redis holds, but for the times at which it came and counters of what was tried."""
    found: dict[str, Any] = {}
    for key in sorted(rig.client.scan_iter("hr:*")):
        name = key.decode()
        if name.endswith(("count", ":wake")):
            continue
        match rig.client.type(key):
            case b"hash":
                found[name] = {
                    k: v for k, v in rig.client.hgetall(key).items() if k not in TIMES and not k.startswith(b"taken")
                }
            case b"zset":
                found[name] = [member for member, _ in rig.client.zrange(key, 0, -1, withscores=True)]
            case b"list":
                found[name] = rig.client.lrange(key, 0, -1)
            case b"stream":
                mine = re.search(r":[tx]:", name)
                found[name] = [(entry if mine else b"", fields) for entry, fields in rig.client.xrange(key)]
            case b"string":
                found[name] = rig.client.get(key)
    return found


TIMES = {b"lu", b"dl", b"rd", b"until", b"jid", b"at"}
HINTS = re.compile(r":new:")  # a hint may come twice: nothing depends on one


def unhinted(held: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in held.items() if not HINTS.search(name)}


def one_call(rig: Rig, case: Case) -> dict[str, Any]:
    """What Redis holds after the script without a fault."""
    case.call(rig, prepared(rig, case))
    held = unhinted(contents(rig))
    rig.client.flushall()
    return held


def but_for_a_second_claim(held: dict[str, Any]) -> dict[str, Any]:
    """A pull that came twice has claimed twice: that is what the epoch counts."""
    hidden = {b"ep"}
    return {n: {k: v for k, v in h.items() if k not in hidden} if isinstance(h, dict) else h for n, h in held.items()}


# An asyncio client sends and reads at once.
PLACES_OF = [(script, place) for script in SCRIPTS for place in PLACES if place != "sent" or not CASES[script].asyncio]


@pytest.mark.parametrize(("script", "place"), PLACES_OF)
def test_a_script_whose_connection_is_lost_is_sent_again_and_changes_nothing_more(
    rig: Rig, script: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[script]
    held = one_call(rig, case)
    rid = prepared(rig, case)
    points = Failpoints(f"{script}.{place}=fail@1")
    monkeypatch.setattr(scripts, "script_point", points.hit_scripts)
    case.call(rig, rid)
    assert points._passed[f"{script}.{place}"] >= 2, "it was not sent again"
    again = unhinted(contents(rig))
    if script == "pull":
        held, again = but_for_a_second_claim(held), but_for_a_second_claim(again)
    assert again == held


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_redis_that_sleeps_for_longer_than_its_client_waits(
    redis_url: str, redis_server: Server, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs what it had been sent when it wakes, and the same once more."""
    monkeypatch.setattr(connections, "COMMAND_TIMEOUT_S", 0.3)
    rig, case = Rig(redis_url), CASES[script]
    one_call(rig, case)  # every script is loaded
    before = calls_of_scripts(rig)
    held = one_call(rig, case)
    without_a_fault = calls_of_scripts(rig) - before
    before = calls_of_scripts(rig)
    rid = prepared(rig, case)
    waking = threading.Timer(0.8, os.kill, (redis_server.pid, signal.SIGCONT))

    def sleep(place: str, calls: Sequence[scripts.Call]) -> None:
        if place == "send" and calls[0].script == script and not waking.ident:
            os.kill(redis_server.pid, signal.SIGSTOP)
            waking.start()

    monkeypatch.setattr(scripts, "script_point", sleep)
    case.call(rig, rid)
    waking.join()
    assert calls_of_scripts(rig) - before > without_a_fault, "Redis was sent it once: this shows nothing"
    again = unhinted(contents(rig))
    if script == "pull":
        held, again = but_for_a_second_claim(held), but_for_a_second_claim(again)
    assert again == held
    rig.client.close()


def calls_of_scripts(rig: Rig) -> int:
    return int(rig.client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


def test_every_script_has_its_case() -> None:
    assert CASES.keys() == set(SCRIPTS)
