"""The native path, which every route and every batch line takes.

body ─ prepare ─► GenerateJob ─ submit ─► queue … feed ─ follow ─► chunks ─► answer
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ..shared.chunks import Finish, TextChunk, Usage
from ..shared.errors import StreamGone
from ..shared.failpoints import failpoint
from ..shared.keys import KEEP_WHOLE_MS
from ..shared.logs import family
from .answers.assemble import body_of
from .answers.results import collect
from .backend import Backend
from .inputs import Caller
from .observe import Observer
from .plan import Plan
from .prepare import Prepared, Preparer
from .readers import Readers, by_index
from .translate import Endpoint

log = logging.getLogger(__name__)

TRIES = 3  # of a whole answer, whose request the store has lost


class Inference:
    """Turns bodies into answers through the queue.

    Args:
        keep_s: how long a finished stream's text stays, in seconds.
        reader_lease_s: how long requests outlive a replica that vanished, in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        preparer: Preparer,
        readers: Readers,
        observer: Observer,
        *,
        keep_s: float = 600.0,
        reader_lease_s: float = 20.0,
    ) -> None:
        self._backend = backend
        self._preparer = preparer
        self._readers = readers
        self._observer = observer
        self._keep_s = keep_s
        self._reader_lease_s = reader_lease_s

    async def prepare(self, endpoint: Endpoint, body: Any, caller: Caller, seed: str | None = None) -> Prepared:
        """See `Preparer.prepare`."""
        return await self._preparer.prepare(endpoint, body, caller, seed)

    async def answer(self, endpoint: Endpoint, body: Any, caller: Caller) -> Any:
        """The whole answer to a body, as JSON values: `prepare` and `complete` in one."""
        return await self.complete(await self.prepare(endpoint, body, caller))

    async def complete(self, prepared: Prepared, grace_s: float = 0) -> Any:
        """Queue a request, wait for its end, and answer it. Cancelling the call cancels the request after `grace_s`.

        Raises:
            GenerationFailed, Overloaded, Unavailable; StreamGone: the store lost it again and again.
        """
        plan = prepared.plan
        family.set(plan.request)
        with self._observer.request(plan) as seen:
            async with self._readers.attach(plan.rids, grace_s=grace_s) as reader:
                tries = TRIES
                while True:
                    try:
                        async with self._queued(prepared) as source:
                            return body_of(plan, await collect(plan, seen.chunks(reader.chunks(source))))
                    except StreamGone as e:  # the client has seen nothing of it
                        tries -= 1
                        if not tries:
                            raise
                        log.warning("the store lost a request that we still hold: %s", e)
                        reader.open.update(plan.rids)

    @asynccontextmanager
    async def run(self, prepared: Prepared, *, grace_s: float) -> AsyncIterator[AsyncIterator[tuple[int, TextChunk]]]:
        """Queue a request and follow it: chunks with the index of their choice, until every choice has ended.

        One that is named may be in the queue already, through a replica that is gone: it is followed from its start.
        """
        plan = prepared.plan
        family.set(plan.request)
        with self._observer.request(plan) as seen:
            async with (
                self._readers.attach(plan.rids, grace_s=grace_s) as reader,
                self._queued(prepared) as source,
            ):
                yield seen.chunks(reader.chunks(source))

    @asynccontextmanager
    async def _queued(self, prepared: Prepared) -> AsyncIterator[AsyncIterable[TextChunk]]:
        """Have a request in the queue, and follow it from its start."""
        if prepared.asks_nothing:
            yield _nothing(prepared)
            return
        rids, feed = prepared.plan.rids, self._backend.feed
        keep_s = self._keep_s if prepared.named else None
        await self._submit(prepared, reader_lease_s=self._reader_lease_s, keep_s=keep_s)
        if prepared.named:  # a replica before us may hold it, and let go of it: from here on it is ours
            await self._backend.queue.touch(rids, reader_lease_s=self._reader_lease_s, reader=feed.name)
        async with feed.follow(rids) as source:
            yield source

    @asynccontextmanager
    async def resume(self, plan: Plan, *, grace_s: float) -> AsyncIterator[AsyncIterator[tuple[int, TextChunk]]]:
        """Follow a request that was queued before, from its start.

        Iterating raises StreamGone when its text is no longer there.
        """
        family.set(plan.request)
        async with (
            self._readers.attach(plan.rids, grace_s=grace_s, resume=True) as reader,
            self._backend.feed.follow(plan.rids) as source,
        ):
            yield reader.chunks(source)

    async def complete_detached(self, prepared: Prepared, keep_s: float) -> Any:
        """As `complete`, without a reader: cancelling the call leaves the request in the queue, where the next call
        with the same seed finds it, for `keep_s` after its end.

        Raises:
            GenerationFailed, Overloaded, Unavailable; StreamGone: it ended longer ago than that.
        """
        plan = prepared.plan
        family.set(plan.request)
        with self._observer.request(plan) as seen:
            if prepared.asks_nothing:
                return body_of(plan, await collect(plan, seen.chunks(by_index(plan.rids, _nothing(prepared)))))
            await self._submit(prepared, reader_lease_s=None, keep_s=keep_s)
            async with self._backend.feed.follow(plan.rids) as source:
                return body_of(plan, await collect(plan, seen.chunks(by_index(plan.rids, source))))

    async def abandon(self, prepared: Prepared) -> None:
        """Take a request out of the queue: nobody wants its answer."""
        await self._backend.queue.cancel(prepared.plan.rids, "The request was cancelled.")

    async def _submit(self, prepared: Prepared, *, reader_lease_s: float | None, keep_s: float | None = None) -> None:
        plan = prepared.plan
        if keep_s is None:
            keep_s = self._keep_s if plan.stream else KEEP_WHOLE_MS / 1000
        submits = [
            self._backend.queue.submit(
                job,
                n=plan.n,
                deadline_s=prepared.deadline_s,
                reader_lease_s=reader_lease_s,
                keep_s=keep_s,
                reader=self._backend.feed.name,
                plan=plan.encode() if plan.stream and i == 0 else b"",
            )
            for i, job in enumerate(prepared.jobs)
        ]
        # All of them first: a failure takes out of the queue what was accepted, and must not come before it.
        for result in await asyncio.gather(*submits, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        failpoint("api.accepted")


async def _nothing(prepared: Prepared) -> AsyncIterator[TextChunk]:
    """The chunks of a request for no tokens, which no worker needs to see."""
    plan = prepared.plan
    for index, rid in enumerate(plan.rids):
        usage = Usage(len(prepared.jobs[plan.prompt_of(index)].input_ids), 0)
        yield TextChunk(rid, 0, "", usage, seq=1, finish=Finish("length"))
