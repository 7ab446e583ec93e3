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
from .clients import TRANSIENT, AsyncClient, Client, Patience
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
def source(name: str) -> str:
    """The text of a script: its flags line, the common part, its own."""
    own = (LUA / f"{name}.lua").read_text()
    flags, _, rest = own.partition("\n") if own.startswith("#!") else ("#!lua", "", own)
    return f"{flags}\n{(LUA / 'common.lua').read_text()}\n{rest}"


@cache
def digest(name: str) -> str:
    return hashlib.sha1(source(name).encode(), usedforsecurity=False).hexdigest()


def _command(call: Call) -> tuple[Arg, ...]:
    return ("EVALSHA", digest(call.script), 1, keys.prefix(call.shard), *call.args)


class Scripts:
    """Script calls over a synchronous client. One thread; between `begin` and `finish` no other call.

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
        self._limit_s = limit_s
        self._on_outage = on_outage or (lambda error: None)
        self._connection: Any = None  # the one that a `begin` waits on
        self._kept: Any = None  # the one that the last call used,
        self._kept_until = 0.0  # and until when

    def call(self, call: Call) -> Any:
        return self.call_many([call])[0]

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Run the calls in one round trip, in order.

        Raises:
            StoreUnavailable: Redis did not answer within the limit.
            redis.exceptions.ResponseError: a script was refused (memory full) or is wrong.
        """
        assert self._connection is None, "a flush is in flight on these scripts: its replies come first"
        patience = Patience(self._limit_s)
        while True:
            try:
                self.begin(calls)
                return self._receive(calls)
            except TRANSIENT as e:
                self._drop()
                self._on_outage(e)
                patience.wait(e)

    def begin(self, calls: Sequence[Call]) -> None:
        """Send the calls and come back at once: Redis works while the caller does. `finish` takes the replies."""
        script_point("send", calls)
        if self._connection is None:
            self._connection = self._take()
        self._connection.send_packed_command(self._connection.pack_commands([_command(c) for c in calls]))

    def begin_quietly(self, calls: Sequence[Call]) -> None:
        """`begin`, but a lost connection shows only in `finish`, which sends again."""
        try:
            self.begin(calls)
        except TRANSIENT:
            self._drop()

    def finish(self, calls: Sequence[Call]) -> list[Any]:
        """The replies to a `begin` of the same calls; over a lost connection they are sent again."""
        try:
            return self._receive(calls)
        except TRANSIENT as e:
            self._drop()
            self._on_outage(e)
            return self.call_many(calls)

    def _receive(self, calls: Sequence[Call]) -> list[Any]:
        if self._connection is None:
            raise redis.exceptions.ConnectionError("the connection was lost before the replies")
        script_point("sent", calls)
        replies = [self._reply() for _ in calls]
        if any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies):
            self._load()
            self.begin(calls)
            replies = [self._reply() for _ in calls]
        script_point("reply", calls)
        self._keep()
        for reply in replies:
            if isinstance(reply, redis.exceptions.ResponseError):
                raise reply
        return replies

    def _reply(self) -> Any:
        try:
            return self._connection.read_response()
        except redis.exceptions.ReadOnlyError:
            raise  # a replica answers: drop the connection and find the master
        except redis.exceptions.ResponseError as e:
            return e

    def _load(self) -> None:
        for name in NAMES:
            self._client.script_load(source(name))

    def _take(self) -> Any:
        """The connection of the last call, if that was just now; otherwise one that the pool finds to be alive."""
        pool = self._client.connection_pool
        if self._kept is not None:
            kept, self._kept = self._kept, None
            if time.monotonic() < self._kept_until:
                return kept
            pool.release(kept)
        return pool.get_connection()

    def _keep(self) -> None:
        self._kept, self._connection = self._connection, None
        self._kept_until = time.monotonic() + KEEP_S

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.disconnect()
            self._client.connection_pool.release(connection)


class AsyncScripts:
    """Script calls over an asyncio client, from any task."""

    def __init__(self, client: AsyncClient, limit_s: float | None = 5.0) -> None:
        self._client = client
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
                pipe.execute_command(*_command(call))
            script_point("send", calls)
            replies: list[Any] = await pipe.execute(raise_on_error=False)
            script_point("reply", calls)
            if last or not any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies):
                break
            for name in NAMES:
                await self._client.script_load(source(name))
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies
