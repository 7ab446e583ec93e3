"""Redis in its real forms, on loopback: a server with TCP and TLS, a primary with replica and sentinels, a cluster."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import redis.exceptions

BASE = {
    "bind": "127.0.0.1",
    "protected-mode": "no",
    "save": '""',
    "appendonly": "no",
    "maxmemory": "128mb",
    "maxmemory-policy": "noeviction",
    "loglevel": "notice",
}
TRYING_S = 20.0


_given: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, and that was not given before: servers are started one after the other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def wait_for(check: Callable[[], Any], what: str) -> Any:
    """What `check` returns, once that is true. A server that does not answer yet is asked again."""
    until = time.monotonic() + TRYING_S
    while True:
        try:
            if value := check():
                return value
        except redis.exceptions.RedisError:
            pass
        assert time.monotonic() < until, what
        time.sleep(0.02)


class Node:
    """One server's process, with a folder of its own."""

    def __init__(self, binary: str, folder: Path, **options: str) -> None:
        self.port = int(options.get("tls-port") or free_port())
        self.folder = folder / str(self.port)
        self.folder.mkdir(exist_ok=True)
        self._binary = binary
        self._options = BASE | {"port": str(self.port), "dir": str(self.folder)} | options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> Node:
        config = self.folder / "redis.conf"
        if not config.exists():  # a sentinel and a promoted replica write theirs anew
            names = {name.replace("_", "-"): value for name, value in self._options.items()}
            config.write_text("".join(f"{name} {value}\n" for name, value in names.items()))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([self._binary, str(config), *flags], stdout=log, stderr=log)
        return self

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(port=self.port, host="127.0.0.1", decode_responses=True, socket_timeout=5, **options)

    def ask(self, *command: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def ready(self) -> Node:
        """Wait until it answers."""
        assert self._process is not None, "start it first"
        until = time.monotonic() + TRYING_S
        while True:
            try:
                self.ask("PING")
            except redis.exceptions.RedisError:
                assert self._process.poll() is None, f"the server on {self.port} ended: {self.log()}"
                assert time.monotonic() < until, f"the server on {self.port} does not answer: {self.log()}"
                time.sleep(0.02)
            else:
                return self

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text()[-2000:] if path.exists() else ""

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Cluster:
    """Three masters, each with `replicas`; slots in three equal ranges."""

    MASTERS = 3

    def __init__(self, binary: str, folder: Path, replicas: int = 0) -> None:
        self._binary, self._folder = binary, folder
        self.nodes = [self._node() for _ in range(self.MASTERS * (1 + replicas))]
        self.masters, self.replicas = self.nodes[: self.MASTERS], self.nodes[self.MASTERS :]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.masters)

    def start(self) -> Cluster:
        for node in self.nodes:
            node.start().ready()
        step = 16384 // self.MASTERS
        for i, node in enumerate(self.masters):
            last = 16383 if i == self.MASTERS - 1 else (i + 1) * step - 1
            node.ask("CLUSTER", "ADDSLOTSRANGE", i * step, last)
        for node in self.nodes[1:]:
            self.nodes[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port, node.bus)  # type: ignore[attr-defined]
        everybody = len(self.nodes)
        for node in self.nodes:
            known = f"cluster_known_nodes:{everybody}"
            wait_for(lambda node=node, known=known: known in node.ask("CLUSTER", "INFO"), "the nodes do not meet")  # type: ignore[misc]
        for i, node in enumerate(self.replicas):
            node.ask("CLUSTER", "REPLICATE", self.masters[i % self.MASTERS].ask("CLUSTER", "MYID"))
        for node in self.nodes:
            wait_for(lambda node=node: "cluster_state:ok" in node.ask("CLUSTER", "INFO"), "the cluster is not up")  # type: ignore[misc]
        for node in self.replicas:
            wait_for(lambda node=node: node.ask("ROLE")[3] == "connected", "a replica does not follow")  # type: ignore[misc]
        return self

    def flush(self) -> None:
        for node in self.nodes:
            if node.ask("ROLE")[0] == "master":
                node.ask("FLUSHALL")

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()

    def _node(self) -> Node:
        bus = free_port()
        node = Node(
            self._binary, self._folder, cluster_enabled="yes", cluster_port=str(bus), cluster_node_timeout="1000"
        )
        node.bus = bus  # type: ignore[attr-defined]
        return node


class Watched:
    """A primary and a replica, and three sentinels that watch them as `mill`."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary, self._folder = binary, folder
        self.primary = Node(binary, folder)
        self.replica = Node(binary, folder, replicaof=f"127.0.0.1 {self.primary.port}")
        self.sentinels = [self._sentinel() for _ in range(3)]

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(f"127.0.0.1:{node.port}" for node in self.sentinels) + "/mill"

    def start(self) -> Watched:
        self.primary.start().ready()
        self.replica.start().ready()
        wait_for(lambda: self.replica.ask("ROLE")[3] == "connected", "the replica does not follow")
        for node in self.sentinels:
            node.start("--sentinel").ready()
        for node in self.sentinels:
            wait_for(lambda node=node: self._knows(node), "the sentinels do not find each other")  # type: ignore[misc]
        return self

    @staticmethod
    def _knows(sentinel: Node) -> bool:
        with sentinel.client() as client:
            masters: Any = client.sentinel_masters()
            master = masters["mill"]
            return int(master["num-other-sentinels"]) == 2 and int(master["num-slaves"]) == 1

    def fail_over(self, lose_s: float = 0.0) -> None:
        """Kill the primary; return when the replica is one, without what was written in the last `lose_s`."""
        if lose_s:
            self.replica.ask("REPLICAOF", "127.0.0.1", 1)
            time.sleep(lose_s)
        self.primary.kill()
        wait_for(lambda: self.replica.ask("ROLE")[0] == "master", "the replica was not promoted")

    def stop(self) -> None:
        for node in (*self.sentinels, self.primary, self.replica):
            node.kill()

    def _sentinel(self) -> Node:
        node = Node(self._binary, self._folder)
        config = node.folder / "redis.conf"
        config.write_text(
            f"port {node.port}\nbind 127.0.0.1\nprotected-mode no\ndir {node.folder}\n"
            f"sentinel monitor mill 127.0.0.1 {self.primary.port} 2\n"
            "sentinel down-after-milliseconds mill 1000\nsentinel failover-timeout mill 3000\n"
        )
        return node
