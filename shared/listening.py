"""Waiting on several connections at once, as a loop on one thread does."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Any


def readable(connections: Sequence[Any], wait_s: float) -> list[Any]:
    """Those of redis-py's connections that something came on; waits for the first, `wait_s` at most.

    Raises:
        TRANSIENT: one of them is broken.
    """
    if len(connections) == 1:
        return [connections[0]] if connections[0].can_read(wait_s) else []
    found = [connection for connection in connections if connection.can_read(0)]
    if found or wait_s <= 0:
        return found
    poll = select.poll()
    for connection in connections:
        poll.register(connection._sock, select.POLLIN)
    poll.poll(wait_s * 1000)
    return [connection for connection in connections if connection.can_read(0)]
