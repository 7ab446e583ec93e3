"""What Redis may answer beside a reply: what is tried again, and for how long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import redis
import redis.exceptions
from headrace.shared.clients import RefusedForNow, connect, connect_async
from headrace.shared.errors import StoreUnavailable
from headrace.shared.scripts import AsyncScripts, Call, Scripts

LEASE = Call("lease", 0, ("me", 60_000))


@pytest.fixture
def without_replicas(redis_url: str) -> Iterator[str]:
    """A server that refuses writes until it has a replica: as one whose disk is full does, which a test cannot fill."""
    with connect(redis_url) as admin:
        admin.config_set("min-replicas-to-write", 1)
        yield redis_url
        admin.config_set("min-replicas-to-write", 0)


def test_a_refused_write_is_an_outage(without_replicas: str) -> None:
    with connect(without_replicas) as client:
        with pytest.raises(RefusedForNow, match="replicas"):
            client.set("a", "b")
        with pytest.raises(RefusedForNow, match="replicas"):
            client.pipeline(transaction=False).set("a", "b").execute()
        with pytest.raises(StoreUnavailable, match="replicas"):
            Scripts(client, limit_s=0.1).call(LEASE)
        assert client.get("a") is None


def test_a_refused_write_is_an_outage_on_asyncio(without_replicas: str) -> None:
    async def go() -> None:
        async with connect_async(without_replicas) as client:
            with pytest.raises(RefusedForNow, match="replicas"):
                await client.set("a", "b")
            with pytest.raises(StoreUnavailable, match="replicas"):
                await AsyncScripts(client, limit_s=0.1).call(LEASE)

    asyncio.run(go())


def test_a_call_waits_until_writes_are_taken_again(without_replicas: str) -> None:
    seen: list[BaseException] = []

    def mend(error: BaseException) -> None:
        seen.append(error)
        with connect(without_replicas) as admin:
            admin.config_set("min-replicas-to-write", 0)

    with connect(without_replicas) as client:
        assert Scripts(client, on_outage=mend).call(LEASE)
    assert len(seen) == 1


def test_somebodys_endless_script_is_waited_for(redis_url: str) -> None:
    with connect(redis_url) as client, connect(redis_url) as hostile, connect(redis_url) as admin:
        client.config_set("busy-reply-threshold", 1)
        admin.ping()  # a busy Redis 7.0 lets nobody say the name of a new connection

        def block() -> None:
            with pytest.raises(redis.exceptions.ResponseError, match="killed"):
                hostile.eval("while true do end", 0)

        endless = threading.Thread(target=block)
        endless.start()
        seen: list[BaseException] = []

        def mend(error: BaseException) -> None:
            seen.append(error)
            admin.script_kill()

        while not seen:  # the first calls may come before the script
            Scripts(client, on_outage=mend).call(LEASE)
        endless.join()
        assert isinstance(seen[0], RefusedForNow)
