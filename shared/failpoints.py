"""Named places between two steps of a role at which a test has the process die, stall, or lose its connection.

HEADRACE_FAILPOINTS=append.sent=kill@3,detok.beat=stall:2   (a list; each process reads its own variable)

    NAME=kill         SIGKILL to ourselves
    NAME=stall:S      nothing of this process moves for S seconds (of an api replica, its event loop)
    NAME=fail         the client's ConnectionError: Redis did what it was asked or not, and we hear nothing of it
    …@n               the n-th time only; …@n+ from the n-th time on; without either, each time

Where the variable is not set, `failpoint` and `script_point` are a function that does nothing: no lookup, no branch.
A script has three points, `append.send` before it is sent, `append.sent` before its reply is read (it runs), and
`append.reply` when it was read. The others are named in `POINTS`, with what stands between.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import redis.exceptions

from .errors import ConfigError

VARIABLE = "HEADRACE_FAILPOINTS"
SCRIPTS = ("submit", "pull", "append", "release", "cancel", "touch", "lease", "publish", "sweep", "overview")
PLACES = ("send", "sent", "reply")  # an asyncio client sends and reads at once: it has no `sent`

POINTS = {
    "worker.listed": "the heartbeat that covers loading ─ loading the model",
    "worker.registered": "the model's card ─ the slot",
    "worker.slot": "the slot ─ the loop",
    "worker.listen": "a turn's beginning ─ the read of hints and commands",
    "worker.beat": "that read ─ the heartbeat",
    "worker.obey": "commands were read ─ the pool's state is kept",
    "worker.answer": "a command was obeyed ─ that is noted, or answered",
    "worker.waiting": "seeing that somebody waits ─ the pull",
    "worker.claimed": "the pull ─ reading what was published of one of its requests",
    "worker.admitted": "the engine has a request ─ it is held",
    "worker.step": "requests are held ─ a step of the engine",
    "worker.recover": "seeing which hand-overs were lost ─ giving them back",
    "worker.leave": "giving back what runs ─ being listed no more",
    "detok.listed": "the heartbeat ─ loading tokenizers",
    "detok.beat": "a turn's beginning ─ the heartbeat",
    "detok.peers": "leases are renewed ─ the peers are counted",
    "detok.free": "the peers are counted ─ the free shards are looked for",
    "detok.subscribed": "pushes of a new shard are heard ─ what is unfinished there is read",
    "detok.look_over": "the sweep ─ unfinished requests are read",
    "detok.read": "the records of requests ─ their tokens",
    "detok.decoded": "tokens were decoded ─ their text is sent",
    "detok.leave": "the last text ─ the shards are given up",
    "api.memory": "a body was translated ─ the store's memory is read",
    "api.accepted": "the submit ─ following its text",
    "api.subscribe": "a connection ─ the subscription to pushes",
    "api.repair": "something is missing ─ it is read",
    "api.resume": "a stream was found ─ its reader lease is taken",
    "api.plan": "a Last-Event-ID was read ─ its stream is looked for",
    "api.leave": "a client went away ─ its requests are let go",
    "api.keep": "some time ─ the reader leases are renewed",
    "api.beat": "some time ─ the heartbeat",
    "watched.judged": "a watched hash was read and judged ─ the change is written",
    "watched.written": "the change was written ─ we hear of it",
    "batch.sweep": "some time ─ the batches that nobody drives are looked for",
    "batch.enqueue": "a slice let go ─ the next one waits in RQ",
    "batch.taken": "a batch was taken ─ anything is done of it",
    "batch.validated": "the input was read ─ the batch is in progress, or failed",
    "batch.written": "a segment of results is on the disk ─ it is committed",
    "batch.committed": "a segment was committed ─ the next lines",
    "batch.placed": "the result files are on the disk ─ they are shown, and the batch ends",
    "batch.published": "the batch has ended ─ its folder is removed",
}
# Redis is asked nothing there, so no connection can be lost.
DEAF = frozenset(
    {"worker.listed", "worker.registered", "worker.slot", "worker.admitted", "worker.step"}
    | {"detok.listed", "detok.decoded", "api.accepted"}
    | {name for name in POINTS if name.startswith("batch.")} - {"batch.sweep", "batch.enqueue"}
)


def names() -> list[str]:
    """Every name that HEADRACE_FAILPOINTS may give."""
    return [*(f"{script}.{place}" for script in SCRIPTS for place in PLACES), *POINTS]


class _Call(Protocol):
    @property
    def script(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at one point, from the `first` time on to the `last`."""

    kill: bool
    stall_s: float
    first: int
    last: float

    def strike(self, name: str) -> None:
        """Raises redis.exceptions.ConnectionError when the fault is `fail`."""
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.stall_s:
            time.sleep(self.stall_s)
        else:
            raise redis.exceptions.ConnectionError(f"failpoint {name}")


class Failpoints:
    """The points of one process.

    Args:
        spec: as HEADRACE_FAILPOINTS.

    Raises:
        ConfigError: there is no such point or action; the message has them all.
    """

    def __init__(self, spec: str) -> None:
        self._faults = dict(_parse(item.strip()) for item in spec.split(",") if item.strip())
        self._passed: Counter[str] = Counter()

    def hit(self, name: str) -> None:
        """We pass this point."""
        self._passed[name] += 1
        fault = self._faults.get(name)
        if fault is not None and fault.first <= self._passed[name] <= fault.last:
            fault.strike(name)

    def hit_scripts(self, place: str, calls: Iterable[_Call]) -> None:
        """We pass this place of a flush: once for each script that is in it."""
        for script in dict.fromkeys(call.script for call in calls):
            self.hit(f"{script}.{place}")


def _parse(item: str) -> tuple[str, Fault]:
    name, _, rest = item.partition("=")
    action, _, times = rest.partition("@")
    if name not in names():
        raise ConfigError(f"{VARIABLE}: there is no point {name!r}. There are: {', '.join(names())}")
    if action == "fail" and name in DEAF:
        raise ConfigError(f"{VARIABLE}: Redis is asked nothing at {name}: it can kill or stall, not fail")
    try:
        stall_s = float(action.removeprefix("stall:")) if action.startswith("stall:") else 0.0
        first = int(times.removesuffix("+") or 1)
        if (action not in ("kill", "fail") and stall_s <= 0) or first < 1:
            raise ValueError(item)
    except ValueError:
        raise ConfigError(f"{VARIABLE}: should be NAME=kill|stall:SECONDS|fail[@n|@n+], got {item!r}") from None
    return name, Fault(action == "kill", stall_s, first, first if times and not times.endswith("+") else float("inf"))


def _nothing(*_: object) -> None:
    """Where no failpoint is asked for."""


failpoint: Callable[[str], None] = _nothing
script_point: Callable[[str, Iterable[_Call]], None] = _nothing
if spec := os.environ.get(VARIABLE):
    _points = Failpoints(spec)
    failpoint, script_point = _points.hit, _points.hit_scripts
