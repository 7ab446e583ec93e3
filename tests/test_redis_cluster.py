"""A Redis Cluster of three masters: every command of one slot, streams over all shards, a master that dies."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Server, a_server_binary
from headrace.shared import keys
from headrace.shared.channels import Channels
from headrace.shared.clients import RefusedForNow, connect, connect_async
from headrace.shared.connections import SlotMoves
from headrace.shared.errors import StoreRefused, StoreUnavailable
from headrace.shared.failpoints import SCRIPTS
from headrace.shared.registry import Membership, ProcessInfo, processes, processes_async
from headrace.shared.scripts import AsyncScripts, Call, Scripts, source
from headrace.shared.settings import StoreSettings
from headrace.shared.slots import SlotMap, key_of, slot_of
from headrace.shared.store import open_store
from headrace.shared.watch import StreamWatch
from kit.redis_servers import Cluster
from kit.streaming import check_texts, started

SHARDS = 12  # four for each master


@pytest.fixture(scope="module")
def running() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="hr"))
    cluster = Cluster(a_server_binary(), folder, replicas=1)
    try:
        yield cluster.start()
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    running.flush()
    return running


def leases(shards: range) -> list[Call]:
    return [Call("lease", shard, ("me", 60_000)) for shard in shards]


def test_the_map_knows_each_slot() -> None:
    reply = [[5, 9, [b"", 2, b"id"]], [0, 4, [b"10.0.0.1", 1, b"id"], [b"10.0.0.9", 9]]]
    slots = SlotMap(reply, ("asked", 7))
    assert [slots.node(slot) for slot in (0, 4, 5, 9)] == [("10.0.0.1", 1)] * 2 + [("asked", 2)] * 2
    assert slots.primaries == [("10.0.0.1", 1), ("asked", 2)]
    with pytest.raises(RefusedForNow, match="slot 10"):
        slots.node(10)


def test_the_key_of_a_command() -> None:
    assert key_of(("EVALSHA", "sha", 1, "hr:{3}:")) == "hr:{3}:"
    assert key_of(("XREAD", "BLOCK", 10, b"STREAMS", "a", "0")) == "a"
    assert key_of(("XGROUP DELCONSUMER", "a", "g", "c")) == "a"
    assert key_of(("TIME",)) is None
    assert slot_of(keys.request(3, "x")) == slot_of(keys.prefix(3)) == slot_of("3")


def test_nothing_but_channels_differs_in_a_clusters_scripts() -> None:
    for name in SCRIPTS:
        assert source(name, sharded=True).replace("SPUBLISH", "PUBLISH") == source(name)
        assert "'PUBLISH'" not in source(name, sharded=True)


def test_scripts_run_at_the_node_of_their_shard(cluster: Cluster) -> None:
    with connect(cluster.url) as client:
        scripts = Scripts(client)
        assert scripts.call_many(leases(range(SHARDS))) == [1] * SHARDS
        for node in cluster.masters:
            node.ask("SCRIPT", "FLUSH")
        assert scripts.call_many(leases(range(SHARDS))) == [1] * SHARDS
        owners = [client.hget(keys.lease(shard), "owner") for shard in range(SHARDS)]
        assert owners == [b"me"] * SHARDS
        there = [sum(bool(list(node.client().scan_iter("hr:*:lease"))) for node in [one]) for one in cluster.masters]
        assert there == [1, 1, 1]

    async def go() -> None:
        async with connect_async(cluster.url) as client:
            for node in cluster.masters:
                node.ask("SCRIPT", "FLUSH")
            assert await AsyncScripts(client).call_many(leases(range(SHARDS))) == [1] * SHARDS

    asyncio.run(go())


def test_what_is_not_a_requests_is_found_by_all(cluster: Cluster) -> None:
    with connect(cluster.url) as client:
        members = [Membership(ProcessInfo("detok")) for _ in range(9)]
        for member in members:
            member.beat(client)
        assert {p.id for p in processes(client)} == {member.info.id for member in members}

        async def found() -> int:
            async with connect_async(cluster.url) as asynchronous:
                return len(await processes_async(asynchronous))

        assert asyncio.run(found()) == 9
        assert client.delete(*(keys.worker(member.info.id) for member in members)) == 9
        assert processes(client) == []


def test_streams_and_channels_of_several_nodes_are_heard(cluster: Cluster) -> None:
    with connect(cluster.url) as client:
        watch, channels = StreamWatch(client), Channels(client)
        after = {keys.new_jobs(shard, "m"): b"0-0" for shard in range(SHARDS)}
        assert watch.news(after) == {}
        channels.subscribe([keys.wake(shard) for shard in range(SHARDS)])
        assert channels.messages(0) == []
        moved: set[str] = set()
        for shard in range(SHARDS):
            client.xadd(keys.new_jobs(shard, "m"), {"l": "std"})
            client.execute_command("SPUBLISH", keys.wake(shard), str(shard))
        while len(moved) < SHARDS:
            moved |= watch.news(after, 1.0).keys()
        heard: list[bytes] = []
        while len(heard) < SHARDS:
            heard += channels.messages(1.0)
        assert sorted(map(int, heard)) == list(range(SHARDS))
        channels.unsubscribe([keys.wake(0)])
        client.execute_command("SPUBLISH", keys.wake(0), "unheard")
        client.execute_command("SPUBLISH", keys.wake(1), "heard")
        assert channels.messages(1.0) == [b"heard"]
        watch.close()
        channels.close()


def test_a_slot_that_moves_is_waited_for(cluster: Cluster) -> None:
    """Its keys are at two nodes then: no script runs there, and none is told that its request is gone."""
    slot = slot_of(keys.prefix(0))
    source_node, target = sorted(cluster.masters, key=lambda node: slot_of("0") not in slots_of(cluster, node))[:2]
    ids = {node: node.ask("CLUSTER", "MYID") for node in (source_node, target)}
    seen: list[BaseException] = []

    def arrive(error: BaseException) -> None:
        seen.append(error)
        if len(seen) == 3:
            found = source_node.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
            source_node.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *found)
            for node in cluster.masters:
                node.ask("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    with connect(cluster.url) as client:
        assert Scripts(client).call(Call("lease", 0, ("me", 60_000))) == 1
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source_node])
        source_node.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        assert Scripts(client, on_outage=arrive).call(Call("lease", 0, ("me", 60_000))) == 1
        assert {type(error) for error in seen[:3]} == {SlotMoves}
        assert client.node_of(keys.lease(0)).connection_pool.connection_kwargs["port"] == target.port

    async def go() -> None:
        async with connect_async(cluster.url) as client:
            assert await AsyncScripts(client).call(Call("lease", 0, ("other", 60_000))) == 0

    asyncio.run(go())


def slots_of(cluster: Cluster, node: object) -> range:
    step = 16384 // Cluster.MASTERS
    i = cluster.masters.index(node)  # type: ignore[arg-type]
    return range(i * step, 16384 if i == Cluster.MASTERS - 1 else (i + 1) * step)


def test_a_cluster_is_named_as_one(cluster: Cluster, redis_url: str) -> None:
    store = open_store(StoreSettings(redis_url=cluster.url))
    assert (store.shards, store.memory) == (SHARDS, 128 << 20)
    with pytest.raises(StoreRefused, match=r"node of a cluster.*redis\+cluster"):
        open_store(StoreSettings(redis_url=f"redis://127.0.0.1:{cluster.masters[0].port}"))
    cluster.masters[1].ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(StoreRefused, match="evicts"):
            open_store(StoreSettings(redis_url=cluster.url))
    finally:
        cluster.masters[1].ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with pytest.raises(StoreUnavailable, match="no node of the cluster answers"):
        open_store(StoreSettings(redis_url="redis+cluster://127.0.0.1:1"), wait_s=0.1)


def test_streams_over_a_cluster_and_the_death_of_a_master(
    cluster: Cluster, redis_server: Server, tmp_path: Path
) -> None:
    with started(cluster.url, tmp_path, control_url=redis_server.url) as deployment:
        check_texts(deployment)
        check_texts(deployment, cluster.masters[2].kill)
