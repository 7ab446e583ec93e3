"""A primary that sentinels watch: found, found again after a promotion, and streams that live through one."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import a_server_binary
from headrace.shared.clients import RefusedForNow, connect, connect_async
from headrace.shared.errors import StoreUnavailable
from headrace.shared.scripts import AsyncScripts, Call, Scripts
from headrace.shared.settings import StoreSettings
from headrace.shared.store import open_store
from headrace.shared.watch import StreamWatch
from kit.redis_servers import Node, Watched, wait_for
from kit.streaming import check_texts, started

LEASE = Call("lease", 0, ("me", 60_000))


@pytest.fixture
def watched() -> Iterator[Watched]:
    folder = Path(tempfile.mkdtemp(prefix="hr"))
    watched = Watched(a_server_binary(), folder)
    try:
        yield watched.start()
    finally:
        watched.stop()
        shutil.rmtree(folder)


@pytest.fixture
def pair() -> Iterator[tuple[Node, Node]]:
    """A primary and its replica, that nobody watches."""
    folder = Path(tempfile.mkdtemp(prefix="hr"))
    primary = Node(a_server_binary(), folder).start().ready()
    replica = Node(a_server_binary(), folder, replicaof=f"127.0.0.1 {primary.port}").start().ready()
    wait_for(lambda: replica.ask("ROLE")[3] == "connected", "the replica does not follow")
    yield primary, replica
    primary.kill()
    replica.kill()
    shutil.rmtree(folder)


def test_the_promoted_replica_is_found_and_gets_the_scripts(watched: Watched) -> None:
    assert open_store(StoreSettings(redis_url=watched.url)).shards == 8
    with connect(watched.url) as client:
        scripts = Scripts(client)
        assert scripts.call(LEASE) == 1
        watched.fail_over()
        assert scripts.call(LEASE) in (1, 2)  # 2 where the promoted one had not heard of the first
        assert client.connection_pool.get_connection().port == watched.replica.port

        async def go() -> int:
            async with connect_async(watched.url) as asynchronous:
                return int(await AsyncScripts(asynchronous).call(LEASE))

        assert asyncio.run(go()) in (1, 2)


def test_what_the_sentinels_do_not_know(watched: Watched) -> None:
    other = watched.url.replace("/mill", "/weir")
    with pytest.raises(StoreUnavailable, match="knows a primary called 'weir'"):
        open_store(StoreSettings(redis_url=other), wait_s=0.1)
    one_left = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{watched.sentinels[2].port}/mill"
    assert open_store(StoreSettings(redis_url=one_left)).shards == 8
    with pytest.raises(StoreUnavailable, match="knows a primary called 'mill'"):
        open_store(StoreSettings(redis_url="redis+sentinel://127.0.0.1:1/mill"), wait_s=0.1)


def test_a_demoted_primary_is_left(pair: tuple[Node, Node]) -> None:
    """Behind a name or an address that moves there are no sentinels that would close its connections."""
    primary, replica = pair
    with connect(f"redis://127.0.0.1:{primary.port}") as client:
        watch = StreamWatch(client)
        assert watch.news({"s": b"0-0"}) == {}
        client.set("a", "b")
        connection = client.connection_pool.get_connection()
        client.connection_pool.release(connection)
        primary.ask("REPLICAOF", "127.0.0.1", replica.port)
        with pytest.raises(RefusedForNow, match="read only"):
            client.set("a", "c")
        assert not connection.is_connected, "a connection to a demoted primary would be used again"
        with pytest.raises(RefusedForNow, match="force unblock"):
            watch.news({"s": b"0-0"}, 1.0)
        with pytest.raises(StoreUnavailable, match="read only"):
            Scripts(client, limit_s=0.1).call(LEASE)


def test_streams_through_a_promotion(watched: Watched, tmp_path: Path) -> None:
    with started(watched.url, tmp_path) as deployment:
        check_texts(deployment, watched.fail_over)


def test_streams_through_a_promotion_that_loses_what_was_shown(watched: Watched, tmp_path: Path) -> None:
    with started(watched.url, tmp_path) as deployment:
        check_texts(deployment, lambda: watched.fail_over(lose_s=1.0))
