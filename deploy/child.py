"""One supervised process: started, its lines relayed under its name, started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from ..shared.errors import HeadraceError
from .cli import EXIT_CONFIG
from .process import role_command

log = logging.getLogger(__name__)

STABLE_S = 10.0  # a process that lived so long was not killed by its start
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
DEATHS_AT_START = 3  # in a row, before everything was ready once: it will not get better
DEATHS_IN_A_ROW = 10  # afterwards, each within STABLE_S of its start
LAST_WORDS_S = 1.0  # a dead child's lines may still be in the pipe, and a grandchild may hold it open


class ChildFailed(HeadraceError):
    """A child cannot run; `status` is what serve exits with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Deaths:
    """Counts deaths in a row, and says how long to wait before the next start, or that there is no hope."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._in_a_row = 0

    def next_pause(self, lived_s: float, how: str, *, was_ready: bool) -> float:
        """Seconds to wait before the next start.

        Raises:
            ChildFailed: it died too often in a row.
        """
        self._in_a_row = 1 if lived_s > STABLE_S else self._in_a_row + 1
        if self._in_a_row >= (DEATHS_IN_A_ROW if was_ready else DEATHS_AT_START):
            raise ChildFailed(f"{self._name} died {self._in_a_row} times in a row; the last time it {how}", 1)
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)))


class Child:
    """A role's process.

    Args:
        role: a command of `headrace`.
        index: tells it from others of its role.
        env: its whole environment.
        fds: file descriptors it inherits.
        prefixed: whether its lines are relayed with its name before them; JSON lines are not.
    """

    def __init__(
        self, role: str, index: int, env: Mapping[str, str], *, fds: Sequence[int] = (), prefixed: bool = True
    ) -> None:
        self.role = role
        self.name = f"{role}.{index}"
        self.pid: int | None = None
        self.was_ready = False
        self.ended = asyncio.Event()
        self._env, self._fds, self._prefixed = dict(env), tuple(fds), prefixed
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._last_line = ""

    async def keep(self) -> None:
        """Run the process, again and again, until `stop` or `kill`.

        Raises:
            ChildFailed: it refuses its settings, or dies again and again.
        """
        loop = asyncio.get_running_loop()
        deaths = Deaths(self.name)
        try:
            while not self._stopping.is_set():
                started = loop.time()
                how = self._how_it_ended(await self._run())
                if self._stopping.is_set():
                    return
                pause = deaths.next_pause(loop.time() - started, how, was_ready=self.was_ready)
                log.warning("%s %s; it starts again in %.1f s", self.name, how, pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause)
        finally:
            self.ended.set()

    def stop(self) -> None:
        """Ask it to drain and end; it is not started again."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; it is not started again."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def _run(self) -> int:
        """Run it once and return its exit status, negative for a signal."""
        self._process = await asyncio.create_subprocess_exec(
            *role_command(self.role),
            env=self._env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            process_group=0,  # Ctrl-C in a terminal is for serve, which stops the roles in their order
            pass_fds=self._fds,
        )
        self.pid = self._process.pid
        if self._stopping.is_set():  # told while it was being started
            self._signal(signal.SIGKILL)
        relay = asyncio.create_task(self._relay(self.pid))
        status = await self._process.wait()
        self.pid = None
        await asyncio.wait({relay}, timeout=LAST_WORDS_S)
        relay.cancel()
        return status

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _relay(self, pid: int) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in _lines(self._process.stdout):
            if line.strip():
                self._last_line = line.strip()
            sys.stderr.write(f"{self.name}[{pid}] {line}\n" if self._prefixed else f"{line}\n")
            sys.stderr.flush()

    def _how_it_ended(self, status: int) -> str:
        """Raises ChildFailed for a refusal of its settings before it ever worked: no new start will mend that."""
        if status == EXIT_CONFIG and not self.was_ready and not self._stopping.is_set():
            raise ChildFailed(f"{self.name} cannot start: {self._last_line}", EXIT_CONFIG)
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}, saying: {self._last_line or 'nothing'}"


async def _lines(stream: asyncio.StreamReader, longest: int = 1 << 16) -> AsyncIterator[str]:
    """Lines as text; longer ones come in pieces, so that no output of a child can stop its relay."""
    held = b""
    while chunk := await stream.read(longest):
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
        if len(held) >= longest:
            yield held.decode(errors="replace")
            held = b""
    if held:
        yield held.decode(errors="replace")
