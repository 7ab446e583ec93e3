"""Following text in an api replica or a batch driver: pushed by hint, repaired by reading, in order, without gaps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from . import keys
from .clients import TRANSIENT, AsyncClient
from .errors import ProtocolError, StreamGone
from .failpoints import failpoint
from .following import HELD_BYTES, Following, lost
from .ids import shard_in
from .logs import about
from .pushes import Pushes
from .text_stream import Position, decode_entry, decode_push

log = logging.getLogger(__name__)

REPAIR_EVERY_S = 1.0  # a choice that was quiet for so long is read from its stream, and after 2, 4, 8, 16, 24, … of it
PATIENCE = 8
READ_ENTRIES = 256  # at once at most, of all choices together, and of each:
LEAST_ENTRIES = 4

Entries = Sequence[tuple[bytes, dict[bytes, bytes]]]


class TextFeed:
    """All that one process follows. Use as an async context manager; `follow` from any task.

    Args:
        name: this process's, unique: the channel that text is pushed to, and `reader` at submit.
    """

    def __init__(self, client: AsyncClient, shards: int, name: str) -> None:
        self._client = client
        self.name = name
        self._by_rid: dict[str, Following] = {}
        self._quiet: dict[str, int] = {}  # rounds of repair in which nothing was pushed to a followed rid
        self._behind: set[str] = set()  # a push showed that something before it is missing
        self._repair_now = asyncio.Event()
        self._entry_bytes = 1000  # of the entries that were read last, on average
        self.on_pause: Callable[[], None] = lambda: None  # called when a client reads too slowly
        self._pushes = Pushes(client, shards, name, self._hear, self._doubt)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TextFeed:
        self._tasks = [asyncio.create_task(self._pushes.listen()), asyncio.create_task(self._repair())]
        return self

    async def __aexit__(self, *_: object) -> None:
        pending = set(self._tasks)
        while pending:
            # More than once: redis-py swallows a cancellation that comes while it connects.
            for task in pending:
                task.cancel()
            _done, pending = await asyncio.wait(pending, timeout=0.1)

    @asynccontextmanager
    async def follow(self, rids: Iterable[str]) -> AsyncIterator[Following]:
        """Chunks of these choices, each choice's in order, from the start on.

        Iterating raises StreamGone when a request is not there (any more): it ended long ago, never was, or the store
        has lost what was shown of it.
        """
        following = Following(rids, room=lambda: self._ask(following.open), pause=lambda: self.on_pause())
        self._by_rid.update(dict.fromkeys(following.positions, following))
        self._ask(following.positions)  # what came before is in the stream, not pushed again
        try:
            yield following
        finally:
            for rid in following.positions:
                if self._by_rid.get(rid) is not following:
                    continue  # another follower has taken over
                del self._by_rid[rid]
                self._quiet.pop(rid, None)
                self._behind.discard(rid)

    def _ask(self, rids: Iterable[str]) -> None:
        self._behind.update(rids)
        self._repair_now.set()

    def _doubt(self) -> None:
        """The store was away, and may have come back with less than we have shown."""
        for following in self._by_rid.values():
            following.doubt()
        self._ask(self._by_rid)

    def _hear(self, data: bytes) -> None:
        try:
            chunk, before = decode_push(data)
        except ProtocolError as e:
            log.error("%s", e)
            return
        following = self._by_rid.get(chunk.rid)
        if following is None:
            return
        self._quiet.pop(chunk.rid, None)
        if not following.offer(chunk, before, len(data)):
            self._ask([chunk.rid])

    async def _repair(self) -> None:
        """Read the streams of those that are behind, at once, and of the quiet ones, now and then."""
        loop = asyncio.get_running_loop()
        look_at = loop.time() + REPAIR_EVERY_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await self._repair_now.wait()
            if loop.time() >= look_at:
                look_at = loop.time() + REPAIR_EVERY_S
                self._behind.update(self._long_quiet())
            self._repair_now.clear()
            behind, self._behind = self._behind, set()
            try:
                await self._read(sorted(behind & self._by_rid.keys()))
            except TRANSIENT:
                self._behind |= behind  # the listener reports the outage

    def _long_quiet(self) -> list[str]:
        """One more round is over: those whose turn it is to be read. A push is lost with its connection alone, and then
        all are read: this finds what should not happen, and must not cost what 1,000 idle streams would."""
        due = []
        for rid, following in self._by_rid.items():
            if rid in following.open:
                self._quiet[rid] = rounds = self._quiet.get(rid, 0) + 1
                if rid in following.doubted or rounds & (rounds - 1) == 0 or rounds % PATIENCE == 0:
                    due.append(rid)
        return due

    async def _read(self, rids: list[str]) -> None:
        """Read what is behind our positions, a part at a time: what a client has no room for is read in vain."""
        for rid in rids:
            if rid in self._by_rid and rid in self._by_rid[rid].doubted:
                await self._retell(rid)
        while rids:
            limit = self._entries_at_once()
            count = max(min(limit, LEAST_ENTRIES), limit // len(rids))
            part, rids = rids[: max(1, limit // count)], rids[max(1, limit // count) :]
            part = [rid for rid in part if rid in self._by_rid and self._by_rid[rid].takes(rid)]
            if part:
                await self._read_part(part, count)

    def _entries_at_once(self) -> int:
        return max(1, min(READ_ENTRIES, HELD_BYTES // self._entry_bytes))

    async def _read_part(self, rids: list[str], count: int) -> None:
        pipe = self._client.pipeline(transaction=False)
        asked = {rid: self._by_rid[rid].positions[rid] for rid in rids}  # pushes come while we read
        for rid, here in asked.items():
            shard = shard_in(rid)
            behind = f"({here.end}-{here.seq}" if here != Position() else "-"
            pipe.hmget(keys.request(shard, rid), "o", "xk")
            pipe.xrange(keys.text(shard, rid), min=behind, count=count)
        failpoint("api.repair")
        replies = await pipe.execute()
        self._measure([entry for entries in replies[1::2] for entry in entries])
        for (rid, here), (end, seq), entries in zip(asked.items(), replies[::2], replies[1::2], strict=True):
            following = self._by_rid.get(rid)
            if following is None:
                continue
            self._take(following, rid, entries)
            if not following.takes(rid):
                continue
            if len(entries) == count:
                self._ask([rid])
            elif end is None or seq is None:
                following.fail(StreamGone(f"The request {rid.partition('-')[0]} is no longer there; send it again."))
            elif Position(int(end), int(seq)) < here:
                following.doubted.add(rid)

    def _measure(self, entries: Entries) -> None:
        if entries:
            self._entry_bytes = max(1, sum(_size(fields) for _, fields in entries) // len(entries))

    def _take(self, following: Following, rid: str, entries: Entries) -> None:
        """What was read of a choice behind our position."""
        try:
            for entry_id, fields in entries:
                if following.takes(rid):
                    following.read(decode_entry(rid, entry_id, fields)[0], _size(fields))
        except ProtocolError as e:
            log.error("%s", e, extra=about(rid))
            following.fail(e)  # this reader's alone: the task goes on for the others

    async def _retell(self, rid: str) -> None:
        """Read a choice's stream from its start: does it lead to what was shown, and beyond?"""
        following, behind = self._by_rid[rid], "-"
        told = following.retell(rid)
        while True:
            count = self._entries_at_once()
            pipe = self._client.pipeline(transaction=False)
            pipe.exists(keys.request(shard_in(rid), rid))
            pipe.xrange(keys.text(shard_in(rid), rid), min=behind, count=count)
            there, entries = await pipe.execute()
            self._measure(entries)
            try:
                for entry_id, fields in entries:
                    if rid not in following.doubted or rid not in following.open:
                        return
                    following.retold(decode_entry(rid, entry_id, fields)[0], told, _size(fields))
                    behind = f"({entry_id.decode()}"
            except ProtocolError as e:
                log.error("%s", e, extra=about(rid))
                following.fail(e)
            if len(entries) < count:
                break
        if not there and rid in following.open and rid in following.doubted:
            following.fail(lost(rid))


def _size(fields: dict[bytes, bytes]) -> int:
    return sum(map(len, fields.values()))
