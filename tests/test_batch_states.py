"""Any order of clients' and drivers' steps: terminal states never change, counts add up, files appear with the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine
from typing import Any

import pytest
from headrace.api.batches.lease import BatchLease
from headrace.api.batches.model import Batch, Counts, LineError
from headrace.api.batches.results import Segment
from headrace.api.batches.settings import BatchSettings
from headrace.api.batches.stores import Stores, open_stores
from headrace.api.files.durable import Flush
from headrace.shared.errors import Conflict, Fenced
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.batches import CHAT, lines

NEXT = {
    "validating": {"failed", "in_progress", "cancelling"},
    "in_progress": {"finalizing", "cancelling"},
    "finalizing": {"completed", "expired"},
    "cancelling": {"cancelled"},
}
DRIVER = ("start", "fail", "commit", "again", "complete", "expire", "publish", "release")
STEPS = ("cancel", "take", "take over", *DRIVER, "start", "commit", "again")
TOTAL = 3


class Model:
    """One batch, two drivers, and what must hold after each step."""

    def __init__(self, stores: Stores, batch: Batch) -> None:
        self.stores, self.batch = stores, batch
        self.leases: list[BatchLease] = []
        self.committed = 0

    async def step(self, name: str, old: bool) -> None:
        """Take one step, by the current driver or by one that lost the batch."""
        if name == "cancel":
            with contextlib.suppress(Conflict):
                await self.stores.batches.cancel(self.batch.id)
        elif name in ("take", "take over"):
            await self._take(over=name == "take over")
        else:
            held = self.leases[:-1] if old else self.leases[-1:]
            work = self._work(name, held[-1]) if held else None
            if work is not None and old:
                with pytest.raises(Fenced):
                    await work
            elif work is not None:
                await work
                self.committed += name == "commit"
        await self.check()

    async def _take(self, *, over: bool) -> None:
        if over:  # the driver before went silent
            await self.stores.batches.redis.hset(f"hr:batch:{self.batch.id}", "lease_until", "0")
        lease = await BatchLease.take(self.stores.batches, self.batch.id, f"driver {len(self.leases)}", 60)
        if lease is not None:
            self.leases.append(lease)

    def _work(self, name: str, lease: BatchLease) -> Coroutine[Any, Any, Batch] | None:
        """What a driver would do as it knows the batch; None when it would not."""
        status = lease.batch.status
        if name == "start" and status in ("validating", "cancelling"):
            return lease.start(TOTAL, "m")
        if name == "fail" and status in ("validating", "cancelling") and not lease.batch.total:
            return lease.fail([LineError("empty_file", "x")])
        if name == "commit" and status in ("in_progress", "cancelling") and lease.batch.unanswered:
            return lease.commit(_segment(lease.batch.counts.completed))
        if name == "again" and lease.batch.last_segment and not lease.batch.ended:  # the reply to a commit was lost
            return lease.commit(_segment(lease.batch.counts.completed - 1))
        if name in ("complete", "expire") and status in ("in_progress", "cancelling"):
            return lease.finalize("completed" if name == "complete" else "expired")
        if name == "publish" and status in ("finalizing", "cancelling"):
            return lease.publish(None, None)
        return lease.release() if name == "release" and not lease.batch.ended else None

    async def check(self) -> None:
        before, now = self.batch, await self.stores.batches.get(self.batch.id)
        if before.ended:
            assert dataclasses.replace(now, lease_until=0) == dataclasses.replace(before, lease_until=0)
        elif now.status != before.status:
            assert now.status in NEXT[before.status], f"{before.status} → {now.status}"
            assert getattr(now, f"{now.status}_at") is not None
        assert now.counts.completed == self.committed
        assert now.counts.completed + now.counts.failed <= max(now.total, 0)
        assert now.epoch == len(self.leases)
        active = await self.stores.batches.redis.zscore("hr:batch:active", now.id)
        assert (active is None) == now.ended, "an unfinished batch is always found by the sweep"
        self.batch = now


def _segment(number: int) -> Segment:
    return Segment(f"{number:06}.seg", (number,), 1, 0, Counts(completed=1))


@pytest.fixture(scope="module")
def stores_settings(redis_server: Any, tmp_path_factory: pytest.TempPathFactory) -> BatchSettings:
    return BatchSettings(redis_url=redis_server.url, data_dir=str(tmp_path_factory.mktemp("d")))


step = st.tuples(st.sampled_from(STEPS), st.sampled_from((False, False, False, True)))


@settings(max_examples=60, deadline=None)
@example(started=False, steps=[("cancel", False), ("fail", False)])
@example(started=True, steps=[("commit", False), ("again", False), ("take over", False), ("commit", True)])
@given(started=st.booleans(), steps=st.lists(step, min_size=4, max_size=25))
def test_every_order_of_steps(stores_settings: BatchSettings, started: bool, steps: list[tuple[str, bool]]) -> None:
    async def run() -> None:
        async with open_stores(stores_settings) as stores:
            stores.files.flush = Flush(stores.files.redis, waits=False)  # this is not about the disk
            with stores.files.incoming() as incoming:
                incoming.write(lines(TOTAL))
                file = await stores.files.add(incoming, filename="in.jsonl", purpose="batch")
            model = Model(stores, await stores.batches.create(Batch("", CHAT, file.id, 0, 0)))
            begin = [("take", False), ("start", False)] if started else [("take", False)]
            for name, old in [*begin, *steps]:
                await model.step(name, old)

    asyncio.run(run())
