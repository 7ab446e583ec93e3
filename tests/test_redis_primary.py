"""A server that sentinels still name, and that is no primary any more, is not asked anything."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import a_server_binary
from headrace.shared import connections
from headrace.shared.clients import RefusedForNow, connect, connect_async
from kit.redis_servers import Node, wait_for

URL = "redis+sentinel://127.0.0.1:1/mill"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Node]]:
    """A primary, and a replica of it."""
    folder = Path(tempfile.mkdtemp(prefix="hr"))
    primary = Node(a_server_binary(), folder).start().ready()
    replica = Node(a_server_binary(), folder, replicaof=f"127.0.0.1 {primary.port}").start().ready()
    wait_for(lambda: replica.ask("ROLE")[3] == "connected", "the replica does not follow")
    yield primary, replica
    primary.kill()
    replica.kill()
    shutil.rmtree(folder)


def test_what_is_named_and_is_no_primary_is_refused(pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    named = pair[1]
    monkeypatch.setattr(connections, "find_primary", lambda address: ("127.0.0.1", named.port))
    with connect(URL) as client:
        with pytest.raises(RefusedForNow, match="is not the primary"):
            client.hgetall("hr:models")
        named = pair[0]
        assert client.hgetall("hr:models") == {}


def test_what_is_named_to_asyncio_and_is_no_primary_is_refused(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = pair[1]

    async def find(address: object) -> tuple[str, int]:
        return "127.0.0.1", named.port

    async def go() -> None:
        nonlocal named
        async with connect_async(URL) as client:
            with pytest.raises(RefusedForNow, match="is not the primary"):
                await client.hgetall("hr:models")
            named = pair[0]
            assert await client.hgetall("hr:models") == {}

    monkeypatch.setattr(connections, "find_primary_async", find)
    asyncio.run(go())
