"""The stores of chaotic runs, each with what may befall it: a server behind a proxy, or one that sentinels watch."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import redis.exceptions
from conftest import Server
from kit.proxy import Proxy
from kit.redis_servers import Node, Watched, wait_for

Fault = Callable[[], None]

SETTINGS = ("--appendonly", "yes", "--repl-diskless-sync-delay", "0")  # of servers that sentinels watch


class Store(Protocol):
    """Use as a context manager. `url` is the deployment's way to it, `direct` one that nothing befalls."""

    url: str
    direct: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def faults(self) -> list[Fault]: ...


class OneServer:
    """A server that is killed and started again, and whose connections a proxy delays and cuts.

    Args:
        lossy: its append-only tail is cut, too. Otherwise it has `appendfsync always`: what it answered, it keeps.
    """

    def __init__(self, binary: str, folder: Path, moments: random.Random, *, lossy: bool) -> None:
        self._server = Server(binary, folder, "everysec" if lossy else "always")
        self._moments, self._lossy = moments, lossy
        self.direct = self._server.url

    def __enter__(self) -> Self:
        self._server.start()
        self._proxy = Proxy(self.direct.removeprefix("unix://")).__enter__()
        self.url = self._proxy.url
        return self

    def __exit__(self, *_: object) -> None:
        self._proxy.__exit__()
        self._server.kill()

    def faults(self) -> list[Fault]:
        tails: list[Fault] = [self._cut_tail] if self._lossy else []
        return [self._restart_store, self._cut_connections, self._drop_replies, self._delay, *tails]

    def _restart_store(self) -> None:
        self._server.kill()
        time.sleep(self._moments.uniform(0, 1))
        self._server.start()

    def _cut_tail(self) -> None:
        share = self._moments.random()
        self._server.kill()
        file = sorted((self._server.folder / "appendonlydir").glob("*.incr.aof"))[-1]
        size = file.stat().st_size
        with file.open("r+b") as f:
            f.truncate(size - int(share * min(size // 2, 60_000)))
        self._server.start()

    def _cut_connections(self) -> None:
        self._proxy.cut()

    def _drop_replies(self) -> None:
        self._proxy.drop_replies()
        time.sleep(self._moments.uniform(0, 1))
        self._proxy.cut()

    def _delay(self) -> None:
        self._proxy.delay(self._moments.uniform(0.01, 0.3))
        time.sleep(self._moments.uniform(0.2, 2))
        self._proxy.delay(0)


class WatchedStore:
    """A primary and its replica, which sentinels promote: what the replica has not heard of is lost."""

    def __init__(self, binary: str, folder: Path, moments: random.Random) -> None:
        self._watched = Watched(binary, folder)
        self._moments = moments
        self.url = self.direct = self._watched.url

    def __enter__(self) -> Self:
        self._watched.start()
        for node in self._nodes:
            node.ask("CONFIG", "SET", *(word.removeprefix("--") for word in SETTINGS))
        return self

    def __exit__(self, *_: object) -> None:
        self._watched.stop()

    def faults(self) -> list[Fault]:
        return [
            self._promote,
            self._promote,
            self._promote_behind,
            self._hand_over,
            self._stand_still,
            self._kill_clients,
        ]

    @property
    def _nodes(self) -> tuple[Node, Node]:
        return self._watched.primary, self._watched.replica

    def _promote(self) -> None:
        """The primary dies; it comes back as a replica of the one that was promoted."""
        primary, replica = self._nodes
        primary.kill()
        wait_for(lambda: replica.ask("ROLE")[0] == "master", "the replica was not promoted")
        primary.start("--replicaof", "127.0.0.1", str(replica.port), *SETTINGS).ready()
        self._settle()

    def _promote_behind(self) -> None:
        """As `_promote`, of a replica that has heard nothing for a while."""
        self._watched.replica.ask("REPLICAOF", "127.0.0.1", 1)
        time.sleep(self._moments.uniform(0.1, 1))
        self._promote()

    def _hand_over(self) -> None:
        """The replica is promoted though the primary lives."""
        replica = self._watched.replica
        with suppress(redis.exceptions.ResponseError):  # the last promotion was just now
            self._watched.sentinels[0].ask("SENTINEL", "FAILOVER", "mill")
            wait_for(lambda: replica.ask("ROLE")[0] == "master", "the replica was not promoted")
        self._settle()

    def _stand_still(self) -> None:
        """The primary stands still; for more than a second, it wakes up as one of two primaries."""
        pid = int(self._watched.primary.ask("INFO", "server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self._moments.uniform(0.2, 4))
        os.kill(pid, signal.SIGCONT)
        self._settle()

    def _kill_clients(self) -> None:
        self._watched.primary.ask("CLIENT", "KILL", "TYPE", "normal")

    def _settle(self) -> None:
        """Wait until one is the primary, also in the sentinels' eyes, and the other follows it; know which."""

        def settled() -> bool:
            for primary, replica in (self._nodes, self._nodes[::-1]):
                role = replica.ask("ROLE")  # slave, host, port, state, offset
                follows = primary.ask("ROLE")[0] == "master" and role[2:4] == [primary.port, "connected"]
                if follows and all(self._named(sentinel) == primary.port for sentinel in self._watched.sentinels):
                    self._watched.primary, self._watched.replica = primary, replica
                    return True
            return False

        wait_for(settled, "the promotion does not come to its end")

    @staticmethod
    def _named(sentinel: Node) -> int:
        _host, port = sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mill")
        return int(port)
