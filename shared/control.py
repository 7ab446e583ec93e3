"""Telling the workers of a pool what to do while they serve: a broadcast with replies.

    api ──Command──► hr:ctl:<pool> ──► every worker of the pool, between two steps
    api ◄──Outcome── hr:ctlr:<id>  ◄── each of them, once

A worker follows the stream from where it stood when the worker started, so it obeys each command once, in order; what a
later one must know is the pool's `PoolState`. The api waits for the workers that were alive when it asked, for so long
and no longer, and says which of them did not answer. One that answers too late has obeyed all the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from . import keys
from .clients import BLOCK_MS, AsyncClient, Client, write_always
from .codec import build, dump, parse
from .errors import Conflict, Unavailable
from .registry import ProcessInfo, processes

Kind = Literal[
    "flush_cache",
    "pause",
    "continue",
    "read_weights",
    "read_lora",
    "commit",
    "discard",
    "unload_lora",
    "start_profile",
    "stop_profile",
]
PauseMode = Literal["abort", "retract", "in_place"]

LATELY_MS = 120_000  # more than workers take from a command to its note in the pool's state

# What a lock's holder alone may delete.
_UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


@dataclass(frozen=True, slots=True)
class Command:
    """What every worker of a pool is to do. `args` are JSON values; which, stands where a kind is obeyed."""

    id: str
    kind: Kind
    args: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> Command:
        return build(cls, parse(data))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one worker says of one command. A `status` of 400 and above is a refusal, and nothing was changed."""

    process: str
    status: int = 200
    message: str = ""
    param: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status < 400

    def encode(self) -> bytes:
        return dump(self)

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        return build(cls, parse(data))


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a worker that joins a pool must do as the others did. Kept until the last worker leaves; where all were
    killed, for as long as one may take to start again.

    `weights` is the folder that replaced `--model`'s; `paused` the mode in which the pool was paused.
    """

    weights: str | None = None
    weight_version: str = ""
    paused: PauseMode | None = None


class Inbox:
    """A worker's end. Commands reach it once each, in order, from its creation on."""

    def __init__(self, client: Client, pool: str, process: str) -> None:
        self._client = client
        self._pool = pool
        self._process = process
        self.stream = keys.control(pool)
        newest = client.xrevrange(self.stream, count=1)
        self.position: bytes = newest[0][0] if newest else b"0-0"

    def read(self) -> list[Command]:
        """The commands that have come since the last call; never waits."""
        found = self._client.xread({self.stream: self.position})
        commands = []
        for entry, fields in found[0][1] if found else []:
            self.position = entry
            commands.append(Command.decode(fields[b"c"]))
        return commands

    def reply(self, command: Command, outcome: Outcome) -> None:
        """Answer; the api waits for it."""
        key = keys.control_replies(command.id)
        write_always(self._client, "XADD", key, "*", "o", outcome.encode())
        self._client.pexpire(key, keys.REPLY_TTL_MS)

    def state(self) -> PoolState:
        """What the pool was told before we came: its state, and what was said so lately that nobody may have noted
        it yet."""
        changes = {k.decode(): v.decode() for k, v in self._client.hgetall(keys.pool_state(self._pool)).items()}
        seconds, _ = self._client.time()
        for _, fields in self._client.xrange(self.stream, min=1000 * seconds - LATELY_MS, max=self.position):
            changes |= _changes(Command.decode(fields[b"c"]))
        return PoolState(
            changes.get("weights") or None, changes.get("weight_version", ""), changes.get("paused") or None
        )

    def note(self, **changes: str) -> None:
        """Change the pool's state: for workers that come later. Every worker that obeyed writes the same."""
        flat = [part for pair in changes.items() for part in pair]
        write_always(self._client, "HSET", keys.pool_state(self._pool), *flat)
        self.keep_state()

    def leave(self) -> None:
        """We are listed no more; the last of a pool takes its state along, so that a new start is a new start."""
        others = (p for p in processes(self._client) if p.role == "worker" and p.extra.get("pool") == self._pool)
        if next(others, None) is None:
            self._client.delete(keys.pool_state(self._pool), self.stream)

    def keep_state(self) -> None:
        """Say that the pool has a worker, so that its state stays."""
        self._client.pexpire(keys.pool_state(self._pool), keys.POOL_STATE_TTL_MS)


def _changes(command: Command) -> dict[str, str]:
    """What a worker that obeys a command notes in the pool's state."""
    args = command.args
    if command.kind in ("pause", "continue"):
        return {"paused": args["mode"] if command.kind == "pause" else ""}
    if command.kind == "commit" and args["read"] == "read_weights":
        return {"weights": args["folder"], "weight_version": args["version"]}
    return {}


@dataclass(frozen=True, slots=True)
class Answers:
    """What became of a command: an outcome of each worker that answered, and those that did not."""

    outcomes: dict[str, Outcome]
    workers: tuple[ProcessInfo, ...]  # who was asked
    gone: tuple[ProcessInfo, ...] = ()  # ended, or silent for so long that they are taken for dead
    silent: tuple[ProcessInfo, ...] = ()  # alive, and did not answer in time

    @property
    def ok(self) -> bool:
        return not self.gone and not self.silent and all(outcome.ok for outcome in self.outcomes.values())


class ControlChannel:
    """The api's end.

    Args:
        alive: every live process of the deployment.
    """

    def __init__(self, client: AsyncClient, alive: Callable[[], Awaitable[list[ProcessInfo]]]) -> None:
        self._client = client
        self._alive = alive

    @asynccontextmanager
    async def exclusive(self, pool: str, limit_s: float) -> AsyncIterator[None]:
        """Keep others from changing the pool in between, for the time of the block and `limit_s` at most.

        Raises:
            Conflict: another change is under way.
        """
        key, token = keys.control_lock(pool), uuid.uuid4().hex
        if not await write_always(self._client, "SET", key, token, "NX", "PX", int(limit_s * 1000)):
            raise Conflict(f"Another change of the workers of '{pool}' is under way; try again later.")
        try:
            yield
        finally:
            await self._client.eval(_UNLOCK, 1, key, token)

    async def workers(self, pool: str) -> list[ProcessInfo]:
        """The workers of a pool that follow its commands."""
        return [p for p in await self._alive() if p.role == "worker" and _follows(p, pool)]

    async def broadcast(self, pool: str, kind: Kind, args: Mapping[str, Any], wait_s: float) -> Answers:
        """Have every worker of a pool obey, and wait for their answers, `wait_s` at most.

        Raises:
            Unavailable: the pool has no worker.
        """
        workers = await self.workers(pool)
        if not workers:
            raise Unavailable(f"No worker of '{pool}' is ready.")
        command = Command(uuid.uuid4().hex, kind, args)
        entry = ("MAXLEN", "~", keys.COMMANDS_KEPT, "*", "c", command.encode())
        await write_always(self._client, "XADD", keys.control(pool), *entry)
        return await self._collect(command, workers, time.monotonic() + wait_s)

    async def _collect(self, command: Command, workers: list[ProcessInfo], until: float) -> Answers:
        outcomes: dict[str, Outcome] = {}
        asked = {worker.id for worker in workers}
        waiting = set(asked)
        replies, after = keys.control_replies(command.id), b"0-0"
        while waiting and (left := until - time.monotonic()) > 0:
            block = max(1, min(BLOCK_MS, int(left * 1000)))
            found = await self._client.xread({replies: after}, block=block)
            for entry, fields in found[0][1] if found else []:
                after, outcome = entry, Outcome.decode(fields[b"o"])
                if outcome.process in asked:  # one that came since obeys, too, and nobody waits for it
                    outcomes[outcome.process] = outcome
                waiting.discard(outcome.process)
            if not found:  # do not wait for the dead
                waiting &= {process.id for process in await self._alive()}
        absent = [worker for worker in workers if worker.id not in outcomes]
        gone = tuple(worker for worker in absent if worker.id not in waiting)
        silent = tuple(worker for worker in absent if worker.id in waiting)
        return Answers(outcomes, tuple(workers), gone, silent)


def _follows(process: ProcessInfo, pool: str) -> bool:
    # One that starts reads the pool's state before it is ready.
    return process.extra.get("pool") == pool and process.state != "starting"
