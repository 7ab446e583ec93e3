"""Who reads what here: keeps reader leases alive, and lets go of requests whose client has gone.

One reader per request: a client that resumes ends its older connection, should that one still look alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ..shared.chunks import TextChunk
from ..shared.clients import TRANSIENT
from ..shared.errors import StoreUnavailable, StreamGone, Unavailable
from ..shared.failpoints import failpoint
from ..shared.logs import about
from .backend import Feed, Queue
from .errors import SlowReader

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Reader:
    """One client's attachment to a request's choices. `open` are those that have not ended."""

    rids: tuple[str, ...]
    task: asyncio.Task[Any]
    open: set[str]
    superseded: bool = False
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def chunks(self, source: AsyncIterable[TextChunk]) -> AsyncIterator[tuple[int, TextChunk]]:
        """Each chunk with the index of its choice."""
        index = {rid: i for i, rid in enumerate(self.rids)}
        async for chunk in source:
            if chunk.finish is not None:
                self.open.discard(chunk.rid)
            yield index[chunk.rid], chunk


async def by_index(rids: Sequence[str], source: AsyncIterable[TextChunk]) -> AsyncIterator[tuple[int, TextChunk]]:
    """Each chunk with the place of its choice in `rids`."""
    index = {rid: i for i, rid in enumerate(rids)}
    async for chunk in source:
        yield index[chunk.rid], chunk


class Readers:
    """All readers of this replica."""

    def __init__(self, queue: Queue, feed: Feed, lease_s: float) -> None:
        self._queue = queue
        self._feed = feed
        self._lease_s = lease_s
        self._draining = False
        self._attached: dict[str, Reader] = {}  # by the first choice's rid
        self._background: set[asyncio.Task[None]] = set()

    def drain(self) -> None:
        """From now on a stream that is cut off is cut off by us: it stays for its client to go on with elsewhere."""
        self._draining = True

    def __len__(self) -> int:
        return len(self._attached)

    @asynccontextmanager
    async def attach(self, rids: Sequence[str], *, grace_s: float, resume: bool = False) -> AsyncIterator[Reader]:
        """Read these choices in the current task, from their start.

        Left before they ended, they are cancelled: after `grace_s` when the task was cancelled (the client went away
        and may come back), with the reader lease when it is we that cut it off or cannot go on (the client is told to
        try again, unless there is no grace), at once after any other error.

        Args:
            resume: another may have read them, here or elsewhere: its lease on them becomes ours.

        Raises:
            StoreUnavailable: that could not be written. They are left to their reader lease: the client will try again.
        """
        task = asyncio.current_task()
        assert task is not None
        reader = Reader(tuple(rids), task, set(rids))
        await self._take_over(reader)
        try:
            if resume:
                failpoint("api.resume")
                await self._queue.touch(rids, reader_lease_s=self._lease_s, reader=self._feed.name)
            try:
                yield reader
            except asyncio.CancelledError:
                self._let_go(reader, grace_s)
                raise
            except (SlowReader, StreamGone, Unavailable, StoreUnavailable, *TRANSIENT):
                self._let_go(reader, max(grace_s, self._lease_s) if grace_s > 0 else 0)
                raise
            except BaseException:
                self._let_go(reader, 0)
                raise
        finally:
            if self._attached.get(reader.rids[0]) is reader:
                del self._attached[reader.rids[0]]
            reader.closed.set()

    async def _take_over(self, reader: Reader) -> None:
        while (older := self._attached.get(reader.rids[0])) is not None:
            older.superseded = True
            older.task.cancel()
            await older.closed.wait()
        self._attached[reader.rids[0]] = reader

    def _let_go(self, reader: Reader, grace_s: float) -> None:
        if self._draining and grace_s > 0:
            grace_s = max(grace_s, self._lease_s)
        if reader.open and not reader.superseded:
            self._spawn(self._leave(sorted(reader.open), grace_s))

    async def _leave(self, rids: list[str], grace_s: float) -> None:
        """A short lease ends the requests unless somebody, here or elsewhere, reads on in time."""
        try:
            failpoint("api.leave")
            if grace_s > 0:
                await self._queue.leave(rids, grace_s=grace_s, reader=self._feed.name)
            else:
                await self._queue.cancel(rids, "The client went away.")
        except (StoreUnavailable, *TRANSIENT) as e:
            log.warning("requests end with their reader lease instead of now: %s", e, extra=about(*rids))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def keep(self) -> None:
        """Renew the leases of all that is read here, for ever."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            rids = [rid for reader in self._attached.values() for rid in reader.open]
            if not rids:
                continue
            try:
                failpoint("api.keep")
                await self._queue.touch(rids, reader_lease_s=self._lease_s, reader=self._feed.name)
            except (StoreUnavailable, *TRANSIENT) as e:
                log.warning("reader leases were not renewed: %s", e)

    async def settle(self) -> None:
        """Wait until everything that was let go has been said to Redis."""
        while self._background:
            await asyncio.gather(*self._background)
