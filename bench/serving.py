"""Starting `headrace serve` for a measurement, and what CPU time each of its roles takes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from headrace.deploy.embedded import socket_path


@dataclass(frozen=True)
class Usage:
    """What a role has taken so far, all its processes together."""

    cpu_s: float = 0.0
    switches: int = 0  # voluntary context switches of its threads: how often it waited for something

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s + other.cpu_s, self.switches + other.switches)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s - other.cpu_s, self.switches - other.switches)


@dataclass(frozen=True)
class Serving:
    """A running `headrace serve`: where it answers, its process, and its Valkey."""

    url: str
    pid: int
    redis_url: str

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each role has taken so far; empty where there is no /proc."""
        return {role: usage.cpu_s for role, usage in self.usage().items()}

    def pids(self, role: str) -> list[int]:
        """The processes of a role."""
        found = []
        for pid in _descendants(self.pid):
            with contextlib.suppress(OSError):
                if _role(Path(f"/proc/{pid}/cmdline").read_bytes()) == role:
                    found.append(pid)
        return found

    def usage(self) -> dict[str, Usage]:
        """What each role has taken so far; empty where there is no /proc."""
        usages = dict[str, Usage]()
        for pid in _descendants(self.pid):
            with contextlib.suppress(OSError):  # a process that has just ended
                role = _role(Path(f"/proc/{pid}/cmdline").read_bytes())
                usages[role] = usages.get(role, Usage()) + Usage(_cpu_s(pid), _switches(pid))
        return usages


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[Serving]:
    """`headrace serve` on a free port with data of its own, from its ready line to the end of its drain."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as data:
        command = [sys.executable, "-c", "import sys; from headrace.deploy.cli import main; sys.exit(main())", "serve"]
        command += ["--port", "0", "--data-dir", data, "--log-level", "warning", "--batches", "0", *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                ready = next((line for line in process.stdout if line.startswith("ready ")), "")
                if not ready:
                    raise SystemExit(f"headrace serve ended with status {process.wait()} before it was ready")
                yield Serving(ready.split()[1], process.pid, f"unix://{quote(str(socket_path(Path(data))))}")
            finally:
                process.send_signal(signal.SIGTERM)


def _descendants(pid: int) -> Iterator[int]:
    """`pid` and all below it."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from _descendants(int(child))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _switches(pid: int) -> int:
    lines = [line for status in Path(f"/proc/{pid}/task").glob("*/status") for line in status.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def _role(command_line: bytes) -> str:
    """`headrace: api` is a process title; a server that we started goes by its program's name."""
    title = command_line.replace(b"\0", b" ").decode(errors="replace").strip()
    if title.startswith("headrace: "):
        return title.split()[1]
    return "redis" if "valkey" in title or "redis" in title else "other"
