"""Calls of the Lua scripts in `lua/`, singly and many in one round trip.

Every script takes one key, the shard's prefix, and is idempotent: `call` repeats it over lost connections until its
limit, and a repeat changes nothing. The exception is `pull`, which claims further jobs: `JobQueue.recover`
gives back what a lost reply had claimed. What a script itself refuses is raised at once.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import redis
import redis.exceptions

from . import keys
from .clients import TRANSIENT, AsyncClient, Client, Patience, is_cluster, node_of, node_of_async
from .failpoints import SCRIPTS as NAMES
from .failpoints import script_point

LUA = Path(__file__).with_name("lua")

KEEP_S = 1.0  # a connection that was used just now is alive; an older one is looked at first

Arg = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Call:
    """One script call: its name, the shard it runs in, its ARGV."""

    script: str
    shard: int
    args: Sequence[Arg]


@cache
def source(name: str, sharded: bool = False) -> str:
    """The text of a script: its flags line, the common part, its own.

    Args:
        sharded: what it pushes stays among the nodes of its slot (a cluster tells every node of a plain PUBLISH).
    """
    own = (LUA / f"{name}.lua").read_text()
    flags, _, rest = own.partition("\n") if own.startswith("#!") else ("#!lua", "", own)
    text = f"{flags}\n{(LUA / 'common.lua').read_text()}\n{rest}"
    return text.replace("'PUBLISH'", "'SPUBLISH'") if sharded else text


@cache
def digest(name: str, sharded: bool = False) -> str:
    return hashlib.sha1(source(name, sharded).encode(), usedforsecurity=False).hexdigest()


def _command(call: Call, sharded: bool) -> tuple[Arg, ...]:
    return ("EVALSHA", digest(call.script, sharded), 1, keys.prefix(call.shard), *call.args)


class _Line:
    """Calls to one server: one connection at a time, kept for the next call."""

    def __init__(self, pool: Any, sharded: bool) -> None:
        self._pool = pool
        self._sharded = sharded
        self._connection: Any = None  # the one that replies are due on
        self._kept: Any = None  # the one that the last call used,
        self._kept_until = 0.0  # and until when

    def send(self, calls: Sequence[Call]) -> None:
        if self._connection is None:
            self._connection = self._take()
        packed = self._connection.pack_commands([_command(call, self._sharded) for call in calls])
        self._connection.send_packed_command(packed)

    def receive(self, calls: Sequence[Call]) -> list[Any]:
        """The replies to `send`; what a script refused is among them."""
        replies = [self._reply() for _ in calls]
        if any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies):
            self._load()
            self.send(calls)
            replies = [self._reply() for _ in calls]
        return replies

    def keep(self) -> None:
        """All replies were read."""
        self._kept, self._connection = self._connection, None
        self._kept_until = time.monotonic() + KEEP_S

    def drop(self) -> None:
        """The connection is of no use any more."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.disconnect()
            self._pool.release(connection)

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except redis.exceptions.ResponseError as e:
            return e

    def _load(self) -> None:
        commands = [("SCRIPT", "LOAD", source(name, self._sharded)) for name in NAMES]
        self._connection.send_packed_command(self._connection.pack_commands(commands))
        for _ in commands:
            self._connection.read_response()

    def _take(self) -> Any:
        """The connection of the last call, if that was just now; otherwise one that the pool finds to be alive."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            if time.monotonic() < self._kept_until:
                return kept
            self._pool.release(kept)
        return self._pool.get_connection()


@dataclass(frozen=True, slots=True)
class _Part:
    """What one server was sent of some calls: their places among them; the error, where it was not even sent."""

    line: _Line | None
    places: Sequence[int]
    error: BaseException | None = None


class Scripts:
    """Script calls over a synchronous client. One thread; between `begin_quietly` and `finish` no other call.

    Args:
        client: of `clients.connect`.
        limit_s: how long a call may be repeated while Redis does not answer; None for ever.
        on_outage: called each time Redis did not answer, before the wait.
    """

    def __init__(
        self,
        client: Client,
        limit_s: float | None = None,
        on_outage: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._client = client
        self._sharded = is_cluster(client)
        self._limit_s = limit_s
        self._on_outage = on_outage or (lambda error: None)
        self._lines: dict[Any, _Line] = {}  # by the server's pool
        self._parts: list[_Part] = []  # what is in flight

    def call(self, call: Call) -> Any:
        return self.call_many([call])[0]

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run the calls in one round trip to each server, in order.

        Raises:
            StoreUnavailable: Redis did not answer within the limit.
            redis.exceptions.ResponseError: a script was refused (memory full) or is wrong.
        """
        self.begin_quietly(calls)
        return self.finish(calls)

    def begin_quietly(self, calls: Sequence[Call]) -> None:
        """Send the calls and come back at once: Redis works while the caller does. A lost connection shows only in
        `finish`, which sends again."""
        assert not self._parts, "a flush is in flight on these scripts: its replies come first"
        self._parts = self._send(calls, range(len(calls)))

    def finish(self, calls: Sequence[Call]) -> list[Any]:
        """The replies to a `begin_quietly` of the same calls; over a lost connection they are sent again.

        Raises as `call_many`.
        """
        replies: list[Any] = [None] * len(calls)
        parts, self._parts = self._parts, []
        patience = Patience(self._limit_s)
        while (lost := self._collect(calls, parts, replies)) is not None:
            error, places = lost
            self._on_outage(error)
            patience.wait(error)
            parts = self._send(calls, places)
        for reply in replies:
            if isinstance(reply, redis.exceptions.ResponseError):
                raise reply
        return replies

    def _send(self, calls: Sequence[Call], places: Sequence[int]) -> list[_Part]:
        try:
            groups = self._by_line(calls, places)
        except TRANSIENT as e:  # no node tells which one has the shards
            return [_Part(None, places, e)]
        return [self._send_one(line, calls, group) for line, group in groups]

    @staticmethod
    def _send_one(line: _Line, calls: Sequence[Call], places: Sequence[int]) -> _Part:
        group = [calls[place] for place in places]
        try:
            script_point("send", group)
            line.send(group)
        except TRANSIENT as e:
            line.drop()
            return _Part(None, places, e)
        return _Part(line, places)

    def _collect(
        self, calls: Sequence[Call], parts: Sequence[_Part], replies: list[Any]
    ) -> tuple[BaseException, list[int]] | None:
        """Read all replies that are due; None, or an error and the places of the calls that have no reply."""
        error: BaseException | None = None
        missing: list[int] = []
        for part in parts:
            group = [calls[place] for place in part.places]
            failed = part.error
            if part.line is not None:
                try:
                    script_point("sent", group)
                    got = part.line.receive(group)
                    script_point("reply", group)
                except TRANSIENT as e:
                    part.line.drop()
                    failed = e
                else:
                    part.line.keep()
                    for place, reply in zip(part.places, got, strict=True):
                        replies[place] = reply
            if failed is not None:
                error = failed
                missing += part.places
        return None if error is None else (error, missing)

    def _by_line(self, calls: Sequence[Call], places: Sequence[int]) -> list[tuple[_Line, Sequence[int]]]:
        if not self._sharded:
            return [(self._line(self._client.connection_pool), places)] if places else []
        groups: dict[_Line, list[int]] = {}
        for place in places:
            node = node_of(self._client, keys.prefix(calls[place].shard))
            groups.setdefault(self._line(node.connection_pool), []).append(place)
        return list(groups.items())

    def _line(self, pool: Any) -> _Line:
        if pool not in self._lines:
            self._lines[pool] = _Line(pool, self._sharded)
        return self._lines[pool]


class AsyncScripts:
    """Script calls over an asyncio client, from any task."""

    def __init__(self, client: AsyncClient, limit_s: float | None = 5.0) -> None:
        self._client = client
        self._sharded = is_cluster(client)
        self._limit_s = limit_s

    async def call(self, call: Call) -> Any:
        return (await self.call_many([call]))[0]

    async def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """As `Scripts.call_many`."""
        patience = Patience(self._limit_s)
        while True:
            try:
                return await self._try(calls)
            except TRANSIENT as e:
                await patience.wait_async(e)

    async def _try(self, calls: Sequence[Call]) -> list[Any]:
        for last in (False, True):
            pipe = self._client.pipeline(transaction=False)
            for call in calls:
                pipe.execute_command(*_command(call, self._sharded))
            script_point("send", calls)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            script_point("reply", calls)
            unknown = {
                call.shard
                for call, reply in zip(calls, replies, strict=True)
                if isinstance(reply, redis.exceptions.NoScriptError)
            }
            if last or not unknown:
                break
            for shard in unknown if self._sharded else list(unknown)[:1]:
                await self._load(shard)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    async def _load(self, shard: int) -> None:
        node = await node_of_async(self._client, keys.prefix(shard))
        for name in NAMES:
            await node.script_load(source(name, self._sharded))
