"""Which detokenizers live, and how many shards are a fair share among them."""

from __future__ import annotations

import time

from ..shared import keys
from ..shared.clients import Client
from ..shared.registry import processes


class Peers:
    """The ready detokenizers, by heartbeats that move: hosts' clocks are not compared, only our own is read.

    Args:
        me: this process's id in the registry.
        silent_s: after so long without a new heartbeat a peer counts as gone.
    """

    def __init__(self, client: Client, me: str, silent_s: float) -> None:
        self._client = client
        self._me = me
        self._silent_s = silent_s
        self._beats: dict[str, tuple[float, float]] = {}  # id → last heartbeat it wrote, when we saw it move

    def share(self, shards: int) -> int:
        """How many of the shards are ours. Peers that see the same peers take them all, and no two the same place."""
        live = self._live()
        each, left = divmod(shards, len(live))
        return each + (live.index(self._me) < left)

    def _live(self) -> list[str]:
        now = time.monotonic()
        written = {i.decode(): beat for i, beat in self._client.zrange(keys.WORKERS, 0, -1, withscores=True)}
        ready = [p.id for p in processes(self._client) if p.role == "detok" and p.state == "ready" and p.id in written]
        self._beats = {i: self._seen(i, written[i], now) for i in ready}
        return sorted({self._me, *(i for i, (_, at) in self._beats.items() if now - at < self._silent_s)})

    def _seen(self, process_id: str, beat: float, now: float) -> tuple[float, float]:
        """A peer is alive once its heartbeat moved under our eyes: the dead are still listed for a while."""
        before = self._beats.get(process_id)
        if before is None:
            return beat, float("-inf")
        return before if before[0] == beat else (beat, now)
