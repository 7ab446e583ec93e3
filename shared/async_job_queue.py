"""The job queue's other side: the api and the batch driver submit, cancel and keep requests alive, on asyncio."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import redis.exceptions

from . import keys
from .chunks import Finish
from .clients import TRANSIENT, AsyncClient, as_overloaded, nodes_async
from .errors import InvalidRequest, Overloaded, StoreUnavailable, Unavailable
from .failpoints import failpoint
from .ids import choices, shard_in
from .job_queue import by_shard
from .messages import LANES, GenerateJob
from .overview import Overview, read_async
from .scripts import AsyncScripts, Call
from .store import ADMIT_BELOW

UNMEASURED_S = 15.0  # told to who is refused where nothing moves by which to tell
LONGEST_WAIT_S = 120


def retry_after_s(n: int, waiting: int, taken_per_s: float) -> int:
    """When to come again to a full queue, in whole seconds: once a tenth of what waits was taken, and `n` at least, at
    the rate at which workers took lately. Room for one alone would have all that were refused come back for it."""
    room = max(n, waiting // 10)
    return _whole_seconds(room / taken_per_s if taken_per_s > 0 else UNMEASURED_S)


def _whole_seconds(seconds: float) -> int:
    return max(1, math.ceil(min(seconds, LONGEST_WAIT_S)))


class AsyncJobQueue:
    """The api's and the batch driver's side. A call gives up after a few seconds: a client waits.

    Args:
        memory: bytes that Redis may use; the door closes at `ADMIT_BELOW` of them. 0: it never does.
        max_waiting: how many choices may wait in one lane of one pool, in all; roughly, for each shard has a share.
        max_waiting_tenant: the same for one tenant.
    """

    def __init__(
        self,
        client: AsyncClient,
        shards: int,
        *,
        memory: int = 0,
        max_waiting: int = 10_000,
        max_waiting_tenant: int = 10_000,
    ) -> None:
        self._client = client
        self._scripts = AsyncScripts(client)
        self.shards = shards
        self._memory = memory
        self._memory_used = 0
        self._memory_falls = 0.0  # bytes a second, by the last two readings
        self._memory_read_at = float("-inf")
        # Requests spread over the shards by hash, so a shard's share has room for an uneven hand.
        self._max_lane = max(1, -(-2 * max_waiting // shards))
        self._max_tenant = max(1, -(-2 * max_waiting_tenant // shards))

    async def submit(
        self,
        job: GenerateJob,
        *,
        n: int = 1,
        deadline_s: float,
        reader_lease_s: float | None,
        keep_s: float,
        reader: str = "",
        plan: bytes = b"",
    ) -> tuple[str, ...]:
        """Accept a family of `n` choices. Submitting the same family again changes nothing.

        Args:
            job: its `rid` is the family's id, its `sampling.sampling_seed` that of choice 0.
            reader_lease_s: the request is cancelled when nobody has touched it for so long; None: it has no reader.
            keep_s: how long the text stays once the request is done.
            reader: name of the api replica to push text to.
            plan: what any api replica must know to go on with the answer; `plan` reads it as long as the text is kept.

        Returns:
            The rids of the choices.

        Raises:
            Overloaded: the queue or the memory is full.
            InvalidRequest: more choices than may ever wait at once.
            Unavailable: Redis does not answer.
        """
        if n > min(self._max_lane, self._max_tenant):
            raise InvalidRequest(f"{n} choices are more than may wait at once.", param="n")
        await self._check_memory()
        shard, seed = shard_in(job.rid), job.sampling.sampling_seed
        if seed is None:
            raise InvalidRequest("A job has no seed: the api chooses one.", param="seed")
        expected = min(job.sampling.max_new_tokens or 0, 512)  # charged in advance; what it takes settles it
        lease = "" if reader_lease_s is None else int(reader_lease_s * 1000)
        args = (
            *(job.rid, n, job.pool, job.lane, job.tenant, int(deadline_s * 1000), lease, int(keep_s * 1000), reader),
            *(len(job.input_ids) + expected, seed, self._max_lane, self._max_tenant),
            *(job.decode_params().encode(), job.encode(), plan, expected),
        )
        try:
            reply = await self._scripts.call(Call("submit", shard, args))
        except redis.exceptions.ResponseError as e:
            overloaded = as_overloaded(e)
            raise overloaded or e from e
        except StoreUnavailable as e:
            raise Unavailable("The queue does not answer; try again later.") from e
        if reply[0] == b"full":
            waiting, taken_per_s = int(reply[1]), float(reply[2])
            wait_s = retry_after_s(n, waiting, taken_per_s)
            raise Overloaded(f"The queue is full: {waiting} requests wait; try again later.", retry_after_s=wait_s)
        return choices(job.rid, n)

    async def _check_memory(self) -> None:
        """Refuse while there is still room to finish what runs. Memory is read once a second at most."""
        if not self._memory:
            return
        now = time.monotonic()
        if now - self._memory_read_at > 1.0:
            since_s, self._memory_read_at = now - self._memory_read_at, now
            try:
                failpoint("api.memory")
                infos = [await node.info("memory") for node in await nodes_async(self._client)]
                used = max(int(info["used_memory"]) for info in infos)  # of a cluster, the fullest node
            except TRANSIENT as e:
                raise Unavailable("The queue does not answer; try again later.") from e
            self._memory_falls, self._memory_used = (self._memory_used - used) / since_s, used
        above = self._memory_used - ADMIT_BELOW * self._memory
        if above > 0:
            wait_s = _whole_seconds(above / self._memory_falls if self._memory_falls > 0 else UNMEASURED_S)
            raise Overloaded(
                "The queue's memory is nearly full; try again later.", retry_after_s=wait_s, code="memory_full"
            )

    async def cancel(self, rids: Iterable[str], reason: str = "The request was cancelled.") -> int:
        """End requests. Returns how many were still generating."""
        finish = Finish("abort", message=reason).encode()
        calls = [Call("cancel", shard, (finish, *group)) for shard, group in by_shard(rids)]
        return sum(await self._scripts.call_many(calls)) if calls else 0

    async def unfinished(self, pool: str | None = None) -> list[str]:
        """The rids that have not ended, of one pool or of all."""
        rids: list[str] = []
        for shard in range(self.shards):
            found = [rid.decode() for rid in await self._client.zrange(keys.active(shard), 0, -1)]
            if pool is not None and found:
                pipe = self._client.pipeline(transaction=False)
                for rid in found:
                    pipe.hget(keys.request(shard, rid), "pl")
                found = [rid for rid, of in zip(found, await pipe.execute(), strict=True) if of == pool.encode()]
            rids += found
        return rids

    async def touch(self, rids: Iterable[str], *, reader_lease_s: float | None, reader: str) -> dict[str, bool]:
        """Renew the reader leases and have text pushed to `reader`. Returns which requests are still there."""
        lease = "" if reader_lease_s is None else int(reader_lease_s * 1000)
        groups = by_shard(rids)
        replies = await self._scripts.call_many([Call("touch", s, (lease, reader, 0, *group)) for s, group in groups])
        return {
            rid: bool(there)
            for (_, group), reply in zip(groups, replies, strict=True)
            for rid, there in zip(group, reply, strict=True)
        }

    async def leave(self, rids: Iterable[str], *, grace_s: float, reader: str) -> None:
        """Read no more: the requests end after `grace_s`, unless another reader has come or comes by then."""
        calls = [Call("touch", s, (int(grace_s * 1000), reader, 1, *group)) for s, group in by_shard(rids)]
        if calls:
            await self._scripts.call_many(calls)

    async def plan(self, family: str) -> bytes | None:
        """What `submit` was given as `plan`; None when the request is not there (any more), or had none."""
        shard = shard_in(family)
        failpoint("api.plan")
        value: bytes | None = await self._client.hget(keys.request(shard, f"{family}.0"), "an")
        return value

    async def overview(self, pools: Sequence[str]) -> Overview:
        """How the queue stands, with the lanes of these pools."""
        return await read_async(self._client, self.shards, pools)

    async def waiting(self, pool: str) -> dict[str, int]:
        """How many choices wait, by lane."""
        pipe = self._client.pipeline(transaction=False)
        for shard in range(self.shards):
            pipe.hmget(keys.depth(shard, pool), *LANES)
        rows = await pipe.execute()
        return {lane: sum(int(row[i] or 0) for row in rows) for i, lane in enumerate(LANES)}
