"""Following text in an api replica or a batch driver: pushed by hint, repaired by reading, in order, without gaps."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from . import keys
from .channels import Dialect
from .chunks import TextChunk
from .clients import TRANSIENT, AsyncClient, is_cluster, node_of_async
from .errors import ProtocolError, StreamGone
from .failpoints import failpoint
from .ids import shard_in
from .text_stream import Position, decode_entry, decode_push

log = logging.getLogger(__name__)

REPAIR_EVERY_S = 1.0  # a choice that was quiet for so long is read from its stream
TOUCH_EVERY_S = 5.0


class Following:
    """The choices of one client's request, from given positions on. Iterate it once; it ends with the last choice."""

    def __init__(self, positions: dict[str, Position]) -> None:
        self.positions = positions
        self.open = set(positions)
        self._ready: asyncio.Queue[TextChunk | Exception] = asyncio.Queue()

    def offer(self, chunk: TextChunk, before: Position) -> bool:
        """Take a chunk that stands at `before`; False when something between is missing."""
        here = self.positions[chunk.rid]
        after = Position(chunk.end, chunk.seq)
        if after <= here or chunk.rid not in self.open:
            return True
        if before != here:
            return False
        self._take(chunk, after)
        return True

    def read(self, chunk: TextChunk, after: Position) -> None:
        """Take a chunk that was read from the stream behind our position: nothing can be missing."""
        if after > self.positions[chunk.rid] and chunk.rid in self.open:
            self._take(chunk, after)

    def _take(self, chunk: TextChunk, after: Position) -> None:
        self.positions[chunk.rid] = after
        if chunk.finish is not None:
            self.open.discard(chunk.rid)
        self._ready.put_nowait(chunk)

    def fail(self, error: Exception) -> None:
        self.open.clear()
        self._ready.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[TextChunk]:
        while self.open or not self._ready.empty():
            item = await self._ready.get()
            if isinstance(item, Exception):
                raise item
            yield item


class TextFeed:
    """All that one process follows. Use as an async context manager; `follow` from any task.

    Args:
        name: this process's, unique: the channel that text is pushed to, and `reader` at submit.
    """

    def __init__(self, client: AsyncClient, shards: int, name: str) -> None:
        self._client = client
        self._dialect = Dialect(is_cluster(client))
        self._shards = shards
        self.name = name
        self._by_rid: dict[str, Following] = {}
        self._quiet: set[str] = set()  # followed rids that were not pushed to since the last repair
        self._behind: set[str] = set()  # a push showed that something before it is missing
        self._repair_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TextFeed:
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._repair())]
        return self

    async def __aexit__(self, *_: object) -> None:
        pending = set(self._tasks)
        while pending:
            # More than once: redis-py swallows a cancellation that comes while it connects.
            for task in pending:
                task.cancel()
            _done, pending = await asyncio.wait(pending, timeout=0.1)

    @asynccontextmanager
    async def follow(
        self, rids: Iterable[str], after: Mapping[str, Position] | None = None
    ) -> AsyncIterator[Following]:
        """Chunks of these choices, each choice's in order, from `after` on (from the start by default).

        Iterating raises StreamGone when a request is not there (any more): it ended long ago, or never was.
        """
        following = Following({rid: (after or {}).get(rid, Position()) for rid in rids})
        self._by_rid.update(dict.fromkeys(following.positions, following))
        if after is not None:
            self._ask(following.positions)  # what came before is in the stream, not pushed again
        try:
            yield following
        finally:
            for rid in following.positions:
                if self._by_rid.get(rid) is not following:
                    continue  # another follower has taken over
                del self._by_rid[rid]
                self._quiet.discard(rid)
                self._behind.discard(rid)

    def _ask(self, rids: Iterable[str]) -> None:
        self._behind.update(rids)
        self._repair_now.set()

    async def _listen(self) -> None:
        """Hear pushes for ever. What is said while we are not connected is repaired."""
        pause = 0.05
        while True:
            try:
                async with self._subscribed() as connections:
                    self._ask(list(self._by_rid))
                    pause = 0.05
                    await self._hear_all(connections)
            except TRANSIENT as e:
                log.warning("text pushes stopped, reading instead: %s", e)
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def _hear_all(self, connections: Sequence[Any]) -> None:
        """Hear each of them until one is broken: what it would say may be said at another node then."""
        if len(connections) == 1:
            return await self._hear_one(connections[0])
        tasks = [asyncio.create_task(self._hear_one(connection)) for connection in connections]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear_one(self, connection: Any) -> None:
        while True:
            said = self._dialect.heard(await connection.read_response(timeout=math.inf))
            if said is not None:
                self._hear(said)

    @asynccontextmanager
    async def _subscribed(self) -> AsyncIterator[list[Any]]:
        """Connections of our own that hear our channels. redis-py's PubSub starts a timer for each message."""
        connections: dict[Any, Any] = {}  # by the server's pool
        try:
            for pool, names in (await self._channels()).items():
                connections[pool] = connection = await pool.get_connection()
                failpoint("api.subscribe")
                for command in self._dialect.commands(self._dialect.subscribe, names):
                    await connection.send_command(*command)
                for _ in names:
                    await connection.read_response()
            yield list(connections.values())
        finally:
            for pool, connection in connections.items():
                await connection.disconnect(nowait=True)  # a subscribed one is of no use to anybody else
                await pool.release(connection)

    async def _channels(self) -> dict[Any, list[str]]:
        """The names of our channels, by the pool of the server that has them."""
        names: dict[Any, list[str]] = {}
        for shard in range(self._shards):
            name = keys.reader_channel(shard, self.name)
            names.setdefault((await node_of_async(self._client, name)).connection_pool, []).append(name)
        return names

    def _hear(self, data: bytes) -> None:
        try:
            chunk, before = decode_push(data)
        except ProtocolError as e:
            log.error("%s", e)
            return
        following = self._by_rid.get(chunk.rid)
        if following is None:
            return
        self._quiet.discard(chunk.rid)
        if not following.offer(chunk, before):
            self._ask([chunk.rid])

    async def _repair(self) -> None:
        """Read the streams of those that are behind, at once, and of the quiet ones, every second."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + REPAIR_EVERY_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await self._repair_now.wait()
            if loop.time() >= look_at:
                look_at = loop.time() + REPAIR_EVERY_S
                self._behind.update(self._quiet & self._by_rid.keys())
                self._quiet = {rid for rid, f in self._by_rid.items() if rid in f.open}
            self._repair_now.clear()
            behind, self._behind = self._behind, set()
            try:
                await self._read(sorted(behind & self._by_rid.keys()))
            except TRANSIENT:
                self._behind |= behind  # the listener reports the outage

    async def _read(self, rids: list[str]) -> None:
        if not rids:
            return
        pipe = self._client.pipeline(transaction=False)
        for rid in rids:
            shard, here = shard_in(rid), self._by_rid[rid].positions[rid]
            pipe.exists(keys.request(shard, rid))
            pipe.xrange(keys.text(shard, rid), min=f"({here.end}-{here.seq}" if here != Position() else "-")
        failpoint("api.repair")
        replies = await pipe.execute()
        for rid, there, entries in zip(rids, replies[::2], replies[1::2], strict=True):
            following = self._by_rid.get(rid)
            if following is None:
                continue
            try:
                for entry_id, fields in entries:
                    following.read(*decode_entry(rid, entry_id, fields))
            except ProtocolError as e:
                following.fail(e)  # this reader's alone: the task goes on for the others
            if not there and rid in following.open:
                following.fail(StreamGone(f"The request {rid.partition('-')[0]} is no longer there; send it again."))
