"""The shards that this detokenizer leases: renewed in time, shared fairly, given up at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..shared import keys
from ..shared.clients import Client
from ..shared.failpoints import failpoint
from ..shared.scripts import Scripts
from ..shared.text_stream import ShardLease
from .peers import Peers

LOADING_S = 30.0  # the longest that a tokenizer should take to load
UNSHARED_S = 60.0  # after a peer left its share untaken


class Shards:
    """Leases and their fences.

    A peer's shards come free when it gives them up, or a lease after it died. Each detokenizer takes free ones up to
    its share; one that stays free for two leases is taken by anyone, since a shard without an owner stands still.

    Args:
        owner: this process as the fence of its writes (a uuid).
        member: this process's id in the registry.

    Attributes:
        lease_s: of a shard.
        epochs: fence of each shard that is ours.
    """

    def __init__(self, client: Client, scripts: Scripts, owner: str, member: str, count: int, lease_s: float) -> None:
        self._client = client
        self._lease = ShardLease(scripts, owner, lease_s)
        self._long_lease = ShardLease(scripts, owner, LOADING_S)
        self._peers = Peers(client, member, lease_s)
        self._all = range(count)
        self.lease_s = lease_s
        self._next = float("-inf")
        self._free_since: dict[int, float] = {}
        self._share_again_at = float("-inf")
        self.epochs: dict[int, int] = {}

    @property
    def due_in_s(self) -> float:
        """Seconds until `keep` must be called again: a third of the lease after the last time."""
        return max(0.0, self._next - time.monotonic())

    def keep(self) -> None:
        """Renew the leases, leave what is above our share, take what is free."""
        self._next = time.monotonic() + self.lease_s / 3
        self.epochs = self._lease.take(list(self.epochs))
        failpoint("detok.peers")
        share = self._peers.share(len(self._all))
        if time.monotonic() > self._share_again_at:
            self.give_up(sorted(self.epochs)[share:])
        self.epochs |= self._lease.take(self._wanted(share - len(self.epochs)))

    def give_up(self, shards: Sequence[int]) -> None:
        """Leave shards to others at once; what was published of them is all that a successor needs."""
        self._lease.give_up(shards)
        for shard in shards:
            self.epochs.pop(shard, None)

    def lost(self, shard: int) -> None:
        """Another detokenizer leases it now."""
        self.epochs.pop(shard, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The loop stands still while a tokenizer loads: keep what is ours until it moves again."""
        self.epochs = self._long_lease.take(list(self.epochs))
        try:
            yield
        finally:
            self.epochs = self._lease.take(list(self.epochs))

    def _wanted(self, room: int) -> list[int]:
        now = time.monotonic()
        free = self._free()
        self._free_since = {shard: self._free_since.get(shard, now) for shard in free}
        stale = [shard for shard, since in self._free_since.items() if now - since > 2 * self.lease_s]
        if stale:  # a peer that lives does not take its share: do not leave it ours again at once
            self._share_again_at = now + UNSHARED_S
        return sorted({*free[: max(0, room)], *stale})

    def _free(self) -> list[int]:
        others = [shard for shard in self._all if shard not in self.epochs]
        failpoint("detok.free")
        pipe = self._client.pipeline(transaction=False)
        pipe.time()
        for shard in others:
            pipe.hget(keys.lease(shard), "until")
        (seconds, micros), *until = pipe.execute()
        now_ms = seconds * 1000 + micros // 1000
        return [shard for shard, at in zip(others, until, strict=True) if int(at or 0) <= now_ms]
