"""Shares of shards among detokenizers, told by heartbeats that move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from headrace.detok import peers
from headrace.detok.peers import Peers
from headrace.shared.clients import Client, connect
from headrace.shared.registry import Membership, ProcessInfo, Role, State


class Clock:
    """Stands in for `time`: our own clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    return clock


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    client = connect(redis_url)
    yield client
    client.close()


def beat(client: Client, name: str, at: int, role: Role = "detok", state: State = "ready") -> None:
    """A heartbeat that says `at` by a clock that is not ours."""
    Membership(ProcessInfo(role, id=name, state=state)).beat(client)
    client.zadd("hr:workers", {name: at})


def shares(client: Client, clock: Clock, members: dict[str, Peers], dead: tuple[str, ...] = ()) -> dict[str, int]:
    """Each member beats and looks twice, a second apart."""
    out = {}
    for _ in range(2):
        clock.now += 1
        for name in members:
            if name not in dead:
                beat(client, name, int(clock.now))
        out = {name: each.share(8) for name, each in members.items() if name not in dead}
    return out


def test_shares_add_up_to_all_shards(client: Client, clock: Clock) -> None:
    members = {name: Peers(client, name, 3.0) for name in "abc"}
    assert shares(client, clock, members) == {"a": 3, "b": 3, "c": 2}


def test_a_peer_that_falls_silent_has_no_share(client: Client, clock: Clock) -> None:
    members = {name: Peers(client, name, 3.0) for name in "ab"}
    assert shares(client, clock, members) == {"a": 4, "b": 4}
    assert shares(client, clock, members, dead=("b",)) == {"a": 4}
    clock.now += 2
    assert members["a"].share(8) == 8


def test_the_dead_that_are_still_listed_have_no_share(client: Client, clock: Clock) -> None:
    beat(client, "dead", 5)
    assert Peers(client, "new", 3.0).share(8) == 8


def test_other_roles_and_those_that_are_not_ready_have_no_share(client: Client, clock: Clock) -> None:
    mine = Peers(client, "a", 3.0)
    for at in (1, 2):
        beat(client, "w", at, role="worker")
        beat(client, "b", at, state="starting")
        beat(client, "c", at, state="draining")
        assert mine.share(8) == 8
