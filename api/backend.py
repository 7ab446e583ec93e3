"""What the api asks of Redis, as protocols: the real classes live in `shared`, a test puts its own in their place."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ..shared.chunks import TextChunk
from ..shared.control import Answers, Kind
from ..shared.messages import GenerateJob
from ..shared.model_card import ModelCard
from ..shared.overview import Overview
from ..shared.registry import ProcessInfo


class Queue(Protocol):
    """`shared.job_queue.AsyncJobQueue`."""

    shards: int

    async def submit(
        self,
        job: GenerateJob,
        *,
        n: int = 1,
        deadline_s: float,
        reader_lease_s: float | None,
        keep_s: float,
        reader: str = "",
        plan: bytes = b"",
    ) -> tuple[str, ...]: ...

    async def plan(self, family: str) -> bytes | None: ...

    async def cancel(self, rids: Iterable[str], reason: str = ...) -> int: ...

    async def touch(self, rids: Iterable[str], *, reader_lease_s: float | None, reader: str) -> dict[str, bool]: ...

    async def leave(self, rids: Iterable[str], *, grace_s: float, reader: str) -> None: ...

    async def unfinished(self, pool: str | None = None) -> list[str]: ...

    async def overview(self, pools: Sequence[str]) -> Overview: ...


class Feed(Protocol):
    """`shared.text_feed.TextFeed`."""

    name: str

    def follow(self, rids: Iterable[str]) -> AbstractAsyncContextManager[AsyncIterable[TextChunk]]: ...


class Models(Protocol):
    """`shared.registry.ModelRegistry`."""

    async def all(self) -> dict[str, ModelCard]: ...

    async def get(self, name: str) -> ModelCard: ...

    def expire(self) -> None: ...

    async def blob(self, sha256: str) -> bytes: ...


class Processes(Protocol):
    """The processes of the deployment."""

    async def alive(self) -> list[ProcessInfo]: ...


class Control(Protocol):
    """`shared.control.ControlChannel`."""

    def exclusive(self, pool: str, limit_s: float) -> AbstractAsyncContextManager[None]: ...

    async def workers(self, pool: str) -> list[ProcessInfo]: ...

    async def broadcast(self, pool: str, kind: Kind, args: Mapping[str, Any], wait_s: float) -> Answers: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything of Redis that the api uses."""

    queue: Queue
    feed: Feed
    models: Models
    processes: Processes
    control: Control
