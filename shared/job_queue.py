"""The job queue: who waits, who runs, who gives up. The side of workers and detokenizers.

A request waits in its tenant's list; `pull` moves it to the workers' stream and claims it in one step, so that lane and
tenant are chosen when there is room, not at arrival. It leaves the stream in one of four ways: its end was written
(`append`), its text is out (`publish`), it was given back (`release`), or its worker's lease ran out (`sweep`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import redis
import redis.exceptions

from . import keys
from .chunks import Finish
from .clients import Client, write_always
from .errors import ProtocolError
from .failpoints import failpoint
from .ids import shard_in
from .logs import about
from .messages import LANES, GenerateJob
from .scripts import Call, Scripts

log = logging.getLogger(__name__)

# What a sweep does about a request, and how loudly it is said; `%s` is the worker that held it.
SWEPT = {
    "lost": (logging.WARNING, "worker %s was silent for a lease: the request waits for another"),
    "dead": (logging.ERROR, "worker %s was its last: the request is given up"),
    "expired": (logging.INFO, "the request passed its deadline, held by %s"),
    "unread": (logging.INFO, "nobody reads the request, held by %s: it ends"),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A job in a worker's hands. `produced` tokens are published already; `attempts` earlier claims made none."""

    job: GenerateJob
    epoch: int
    produced: int
    attempts: int

    @property
    def suspect(self) -> bool:
        """One more death before a token and the request is given up."""
        return self.attempts >= keys.MAX_ATTEMPTS - 1


def by_shard(rids: Iterable[str]) -> list[tuple[int, list[str]]]:
    """The rids grouped by shard."""
    return [(shard, list(group)) for shard, group in groupby(sorted(rids, key=shard_in), shard_in)]


class JobQueue:
    """The worker's and the detokenizer's side. Waits for Redis as long as it takes.

    Attributes:
        somebody_waited: what the last `pull` found, before it took what there was room for.
    """

    def __init__(self, client: Client, scripts: Scripts, shards: int) -> None:
        self._client = client
        self._scripts = scripts
        self._shards = shards
        self._first = 0  # the shard to ask first next time: none is favoured
        self.somebody_waited = False

    def pull(
        self, pool: str, *, owner: str, consumer: str, slots: int, lease_s: float, quiet: bool = True
    ) -> list[Claim]:
        """Claim up to `slots` waiting jobs, lane by lane over all shards.

        A body that cannot be read is poison: its client is answered, and it is not returned.

        Args:
            quiet: every job that the caller holds has published a token since its claim, so none would be charged for
                the death of another. A suspect (`Claim.suspect`) is handed over then, and alone; until then nothing is.
        """
        claims: list[Claim] = []
        for lane, shard in self._waiting(pool, quiet):
            if len(claims) >= slots:
                break
            wanted = 1 if lane == "suspect" else slots - len(claims)
            args = (pool, owner, consumer, wanted, int(lease_s * 1000), lane)
            failpoint("worker.waiting")
            for reply in self._scripts.call(Call("pull", shard, args)):
                claim = self._claim(owner, reply)
                if claim is not None:
                    claims.append(claim)
            if lane == "suspect" and claims:
                break
        return claims

    def _waiting(self, pool: str, quiet: bool) -> list[tuple[str, int]]:
        """Lanes and shards in which somebody waits: suspects, then interactive lanes, then the rest."""
        shards = [(self._first + i) % self._shards for i in range(self._shards)]
        self._first = (self._first + 1) % self._shards
        places: list[tuple[str, int]] = [("suspect", shard) for shard in shards]
        places += [(lane, shard) for lane in LANES for shard in shards]
        pipe = self._client.pipeline(transaction=False)
        for lane, shard in places:
            pipe.exists(keys.suspects(shard, pool) if lane == "suspect" else keys.tenants(shard, pool, lane))
        there = [place for place, found in zip(places, pipe.execute(), strict=True) if found]
        self.somebody_waited = bool(there)
        if there and there[0][0] == "suspect" and not quiet:
            return []
        return there

    def _claim(self, owner: str, reply: Sequence[Any]) -> Claim | None:
        rid, epoch, produced, attempts, seed, body = reply
        rid = rid.decode()
        try:
            job = GenerateJob.decode(body)
        except ProtocolError as e:
            self._bury(owner, rid, attempts, f"The job cannot be read: {e}")
            self.fail(owner, rid, epoch, produced, Finish("error", message=f"The job cannot be read: {e}"))
            return None
        sampling = replace(job.sampling, sampling_seed=seed)
        return Claim(replace(job, rid=rid, sampling=sampling), epoch, produced, attempts)

    def _bury(self, owner: str, rid: str, attempts: int, reason: str) -> None:
        """Poison is kept to be looked at, beside what `sweep` gives up."""
        shard = shard_in(rid)
        fields = ("r", rid, "att", attempts, "ow", owner, "why", reason)
        write_always(self._client, "XADD", keys.dead(shard), "MAXLEN", "~", 1000, "*", *fields)
        write_always(self._client, "HINCRBY", keys.counters(shard), "dead", 1)

    def fail(self, owner: str, rid: str, epoch: int, produced: int, finish: Finish) -> None:
        """End a request that this owner holds, after its `produced` tokens."""
        args = (owner, 0, rid, epoch, produced, 0, "", "", "", "", "", finish.encode())
        self._scripts.call(Call("append", shard_in(rid), args))

    def release(self, owner: str, held: Iterable[tuple[str, int]]) -> int:
        """Give jobs (rid, epoch) back to the queue, free of charge. Returns how many were still ours."""
        calls = [
            Call("release", shard, (owner, *(part for rid, epoch in group for part in (rid, epoch))))
            for shard, group in groupby(sorted(held, key=lambda h: shard_in(h[0])), lambda h: shard_in(h[0]))
        ]
        return sum(self._scripts.call_many(calls)) if calls else 0

    def recover(self, pool: str, *, owner: str, consumer: str, held: Iterable[str]) -> int:
        """Give back what was claimed for us by a pull whose reply was lost. Returns how many.

        Call after an outage: such requests would otherwise wait for their lease to run out, and be charged.
        """
        known, lost = set(held), []
        for shard in range(self._shards):
            for lane in LANES:
                stream = keys.jobs(shard, pool, lane)
                for entry in self._pending(stream, consumer):
                    for _, fields in self._client.xrange(stream, entry, entry):
                        rid = fields[b"r"].decode()
                        if rid not in known:
                            lost.append(rid)
        failpoint("worker.recover")
        calls = [
            Call("release", shard, (owner, *(part for rid in group for part in (rid, ""))))
            for shard, group in by_shard(lost)
        ]
        return sum(self._scripts.call_many(calls)) if calls else 0

    def _pending(self, stream: str, consumer: str) -> list[bytes]:
        with _unless_no_group():
            pending = self._client.xpending_range(stream, keys.GROUP, "-", "+", 1000, consumername=consumer)
            return [entry["message_id"] for entry in pending]
        return []

    def reap_consumers(self, pool: str, idle_s: float = 3600.0) -> None:
        """Delete the consumers of hosts that are gone: they hold nothing and were silent for an hour."""
        for stream in (keys.jobs(shard, pool, lane) for shard in range(self._shards) for lane in LANES):
            if not self._client.exists(stream):
                continue
            with _unless_no_group():
                for consumer in self._client.xinfo_consumers(stream, keys.GROUP):
                    if consumer["pending"] == 0 and consumer["idle"] > idle_s * 1000:
                        self._client.xgroup_delconsumer(stream, keys.GROUP, consumer["name"])

    def cancel(self, rids: Iterable[str], finish: Finish) -> int:
        """End requests. Returns how many were still generating."""
        calls = [Call("cancel", shard, (finish.encode(), *group)) for shard, group in by_shard(rids)]
        return sum(self._scripts.call_many(calls)) if calls else 0

    def sweep(self, shard: int, *, reclaim: bool, text_budget: int, limit: int = 200) -> bool:
        """Look at what is due in a shard: lost workers, gone readers, deadlines, finished text over its budget.

        Args:
            reclaim: False for one lease after a (re)connect: idle times ran on while Redis was away.
            text_budget: bytes of finished text to keep in this shard.

        Returns:
            Whether there may be more to look at.
        """
        args = (limit, int(reclaim), keys.MAX_ATTEMPTS, text_budget)
        looked, *done = self._scripts.call(Call("sweep", shard, args))
        for rid, what, owner in zip(done[::3], done[1::3], done[2::3], strict=True):
            level, message = SWEPT[what.decode()]
            log.log(level, message, owner.decode() or "nobody", extra=about(rid.decode()))
        return int(looked) >= limit


@contextmanager
def _unless_no_group() -> Iterator[None]:
    """Nothing was ever handed over in this lane, or its group is gone: the script that hands over makes it."""
    try:
        yield
    except redis.exceptions.ResponseError as e:
        if "NOGROUP" not in str(e):
            raise
