"""What is registered in Redis: models, their files, and the processes of the deployment."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import orjson

from . import keys
from .clients import AsyncClient, Client, write_always
from .errors import ModelNotFound, ProtocolError
from .model_card import ModelCard

log = logging.getLogger(__name__)

Role = Literal["api", "worker", "detok", "batch"]
State = Literal["starting", "ready", "draining", "stuck"]


def register_model(client: Client, card: ModelCard, tokenizer: bytes) -> None:
    """Make a model known for good: its card by name, its tokenizer by content.

    Raises:
        ProtocolError: `card.tokenizer` is not the hash of `tokenizer`.
    """
    if hashlib.sha256(tokenizer).hexdigest() != card.tokenizer:
        raise ProtocolError(f"the card of {card.name} names another tokenizer than the one given")
    write_always(client, "SET", keys.blob(card.tokenizer), tokenizer)
    write_always(client, "HSET", keys.MODELS, card.name, card.encode())


class ModelRegistry:
    """Model cards and blobs, read by the api. Cards are kept for a second, blobs (content-addressed) for good."""

    CARD_TTL_S = 1.0

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._cards: dict[str, ModelCard] = {}
        self._read_at = float("-inf")
        self._blobs: dict[str, bytes] = {}

    async def all(self) -> dict[str, ModelCard]:
        """Every registered model by name."""
        if time.monotonic() - self._read_at > self.CARD_TTL_S:
            raw = await self._client.hgetall(keys.MODELS)
            self._cards = {name.decode(): ModelCard.decode(card) for name, card in sorted(raw.items())}
            self._read_at = time.monotonic()
        return self._cards

    def expire(self) -> None:
        """Read the cards again when they are next asked for: somebody has changed them."""
        self._read_at = float("-inf")

    async def get(self, name: str) -> ModelCard:
        """Raises ModelNotFound."""
        cards = await self.all()
        if name not in cards:
            known = ", ".join(f"'{card}'" for card in cards) or "none yet"
            raise ModelNotFound(f"The model '{name}' does not exist. Registered models: {known}.", param="model")
        return cards[name]

    async def blob(self, sha256: str) -> bytes:
        """A file that a card names.

        Raises:
            ProtocolError: it is not in the store.
        """
        if sha256 not in self._blobs:
            data = await self._client.get(keys.blob(sha256))
            if data is None:
                raise ProtocolError(f"blob {sha256} is not in the store; start a worker of the model again")
            self._blobs[sha256] = data
        return self._blobs[sha256]


def get_blob(client: Client, sha256: str) -> bytes:
    """The synchronous twin of `ModelRegistry.blob`."""
    data = client.get(keys.blob(sha256))
    if not isinstance(data, bytes):
        raise ProtocolError(f"blob {sha256} is not in the store; start a worker of the model again")
    return data


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What one process says of itself. `started_at` is in Unix seconds."""

    role: Role
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    state: State = "starting"
    model: str | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))
    extra: Mapping[str, Any] = field(default_factory=dict)  # load, versions, what else a role reports

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> ProcessInfo:
        raw = orjson.loads(data)
        return cls(**{name: value for name, value in raw.items() if name in cls.__slots__})


class Membership:
    """One process's place among the others: say `beat` at least every few seconds, from the loop that does the work.

    A process that says nothing for `keys.PROCESS_TTL_MS` is no longer listed.
    """

    BEAT_EVERY_S = 2.0

    def __init__(self, info: ProcessInfo) -> None:
        self.info = info
        self._next = float("-inf")
        self._models: dict[str, tuple[ModelCard, bytes]] = {}

    def serve(self, client: Client, card: ModelCard, tokenizer: bytes) -> None:
        """Register a model, and keep it registered from now on: a store that was flushed knows it no more.

        Raises:
            ProtocolError: as `register_model`.
        """
        register_model(client, card, tokenizer)
        self._models[card.name] = card, tokenizer

    def retire(self, client: Client, name: str) -> None:
        """Take a model off the list."""
        self._models.pop(name, None)
        client.hdel(keys.MODELS, name)

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def update(self, state: State | None = None, **extra: Any) -> None:
        """Change what is said; the next `beat` says it at once."""
        if state is not None and state != self.info.state:
            self.info = replace(self.info, state=state)
            self._next = float("-inf")
        if extra:
            self.info = replace(self.info, extra={**self.info.extra, **extra})

    def _write(self, pipe: Any, ttl_ms: int) -> None:
        if "slot" in self.info.extra:
            write_always(pipe, "SET", keys.slot(self.info.host, self.info.extra["slot"]), self.info.id, "PX", ttl_ms)
        write_always(pipe, "SET", keys.worker(self.info.id), self.info.encode(), "PX", ttl_ms)
        write_always(pipe, "ZADD", keys.WORKERS, int(time.time() * 1000), self.info.id)
        self._next = time.monotonic() + self.BEAT_EVERY_S

    def beat(self, client: Client, ttl_ms: int = keys.PROCESS_TTL_MS) -> None:
        """Say that we live. A long `ttl_ms` covers the loading of a model."""
        pipe = client.pipeline(transaction=False)
        self._write(pipe, ttl_ms)
        for card, _ in self._models.values():
            pipe.hexists(keys.MODELS, card.name)
            pipe.exists(keys.blob(card.tokenizer))
        replies = pipe.execute()
        there = replies[len(replies) - 2 * len(self._models) :]
        for number, (card, tokenizer) in enumerate(self._models.values()):
            if not all(there[2 * number : 2 * number + 2]):
                log.warning("the store has lost the model %s: registered again", card.name)
                register_model(client, card, tokenizer)

    async def beat_async(self, client: AsyncClient, ttl_ms: int = keys.PROCESS_TTL_MS) -> None:
        pipe = client.pipeline(transaction=False)
        self._write(pipe, ttl_ms)
        await pipe.execute()

    def say(self, client: Client, state: State) -> None:
        """Be listed in another state, for once: from another thread, while the loop that should `beat` hangs."""
        said = replace(self.info, state=state).encode()
        write_always(client, "SET", keys.worker(self.info.id), said, "PX", keys.PROCESS_TTL_MS)
        write_always(client, "ZADD", keys.WORKERS, int(time.time() * 1000), self.info.id)

    def leave(self, client: Client) -> None:
        """Be listed no more."""
        if "slot" in self.info.extra:
            client.delete(keys.slot(self.info.host, self.info.extra["slot"]))
        client.delete(keys.worker(self.info.id))
        client.zrem(keys.WORKERS, self.info.id)

    async def leave_async(self, client: AsyncClient) -> None:
        await client.delete(keys.worker(self.info.id))
        await client.zrem(keys.WORKERS, self.info.id)


def take_slot(client: Client, member: Membership) -> int:
    """The lowest number that no live process of this host holds. Consumers are named by it, so their names are few.

    `beat` keeps it. Two processes on one number, after an outage, would share a name and nothing else: owners fence.
    """
    slot = 0
    taken = (member.info.id, "NX", "PX", keys.PROCESS_TTL_MS)
    while not write_always(client, "SET", keys.slot(member.info.host, slot), *taken):
        slot += 1
    member.update(slot=slot)
    return slot


def _parse(ids: list[bytes], values: list[bytes | None]) -> tuple[list[ProcessInfo], list[bytes]]:
    live = [ProcessInfo.decode(value) for value in values if value is not None]
    gone = [process_id for process_id, value in zip(ids, values, strict=True) if value is None]
    return sorted(live, key=lambda p: (p.role, p.started_at, p.id)), gone


def processes(client: Client) -> list[ProcessInfo]:
    """Every live process of the deployment; those that went without leaving are taken off the list."""
    ids = client.zrange(keys.WORKERS, 0, -1)
    live, gone = _parse(ids, client.mget([keys.worker(i.decode()) for i in ids]) if ids else [])
    if gone:
        client.zrem(keys.WORKERS, *gone)
    return live


async def processes_async(client: AsyncClient) -> list[ProcessInfo]:
    """The asynchronous twin of `processes`."""
    ids = await client.zrange(keys.WORKERS, 0, -1)
    live, gone = _parse(ids, await client.mget([keys.worker(i.decode()) for i in ids]) if ids else [])
    if gone:
        await client.zrem(keys.WORKERS, *gone)
    return live


class ServedModels:
    """What one worker serves, as the others read it. `tokenizer` is the base model's."""

    def __init__(self, client: Client, member: Membership, tokenizer: bytes) -> None:
        self._client = client
        self._member = member
        self._tokenizer = tokenizer

    def say(self, **extra: Any) -> None:
        """Change what this worker says of itself, at once."""
        self._member.update(**extra)
        self._member.beat(self._client)

    def serve(self, card: ModelCard) -> None:
        self._member.serve(self._client, card, self._tokenizer)

    def retire(self, name: str) -> None:
        self._member.retire(self._client, name)

    def card(self, name: str) -> ModelCard | None:
        """The card under which a model is registered, if it is."""
        data = self._client.hget(keys.MODELS, name)
        return ModelCard.decode(data) if data is not None else None

    def adapters(self, pool: str) -> list[ModelCard]:
        """The cards of a pool's adapters."""
        cards = [ModelCard.decode(data) for data in self._client.hvals(keys.MODELS)]
        return sorted((card for card in cards if card.pool == pool and card.lora), key=lambda card: card.name)
