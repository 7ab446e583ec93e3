"""The api's backend in memory: requests are answered by a script, at once, in the order the script gives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from headrace.api.app import create_app
from headrace.api.backend import Backend
from headrace.api.services import Services, build
from headrace.api.settings import ApiSettings
from headrace.shared.chunks import Finish, TextChunk, TextLogprob, Usage
from headrace.shared.control import Answers, Kind, Outcome
from headrace.shared.errors import ModelNotFound, StreamGone
from headrace.shared.ids import choices, shard_in
from headrace.shared.messages import LANES, GenerateJob, Lane
from headrace.shared.model_card import ModelCard
from headrace.shared.overview import COUNTERS, LaneState, Overview
from headrace.shared.registry import ProcessInfo
from kit.tokenizers import byte_level

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOB = byte_level().blob
VOCAB = byte_level().tokenizer.get_vocab_size()


def card(name: str = "m", **changes: object) -> ModelCard:
    """A model of the byte-level test tokenizer, with a context of 256."""
    fields: dict[str, object] = {
        "name": name,
        "pool": name,
        "tokenizer": hashlib.sha256(BLOB).hexdigest(),
        "context_length": 256,
        "vocab_size": VOCAB,
        "chat_template": CHATML,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "created": 1_700_000_000,
    }
    return ModelCard(**(fields | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Step:
    """One chunk of a script, by its text; each is `tokens` tokens."""

    text: str
    tokens: int = 1
    finish: Finish | None = None
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob, ...] | None = None


def say(*texts: str, finish: Finish | None = None) -> list[Step]:
    """A step per text, the last of which ends the choice."""
    return [*(Step(text) for text in texts[:-1]), Step(texts[-1], finish=finish or Finish("stop"))]


Script = Callable[[GenerateJob, int], Sequence[Step]]


@dataclass
class FakeBackend:
    """Queue, feed, models and processes in one. Records what it was asked.

    `script(job, choice)` says what a choice answers; a script without a finish leaves its choice open.
    """

    script: Script = lambda job, choice: say("Hello", " world")
    cards: dict[str, ModelCard] = field(default_factory=lambda: {"m": card()})
    alive_processes: list[ProcessInfo] = field(
        default_factory=lambda: [ProcessInfo("worker", state="ready", model="m"), ProcessInfo("detok", state="ready")]
    )
    error: Exception | None = None  # what `submit` raises
    name: str = "fake"
    shards: int = 2
    jobs: list[GenerateJob] = field(default_factory=list)
    texts: dict[str, list[TextChunk]] = field(default_factory=dict)
    plans: dict[str, bytes] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    left: list[tuple[str, float]] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    commands: list[tuple[str, Kind, dict[str, Any]]] = field(default_factory=list)
    obey: Callable[[ProcessInfo, Kind], Outcome] = lambda worker, kind: Outcome(worker.id)
    hold_s: float = 30.0  # how long an open choice is waited for

    async def submit(self, job: GenerateJob, *, n: int = 1, plan: bytes = b"", **_: object) -> tuple[str, ...]:
        if self.error is not None:
            raise self.error
        self.jobs.append(job)
        rids = choices(job.rid, n)
        if plan:
            self.plans[job.rid] = plan
        for i, rid in enumerate(rids):
            self.texts[rid] = _chunks(rid, len(job.input_ids), self.script(job, i))
        return rids

    async def plan(self, family: str) -> bytes | None:
        shard_in(family)  # refuses what is no id, as the queue does
        return self.plans.get(family)

    async def cancel(self, rids: Iterable[str], reason: str = "") -> int:
        self.cancelled += rids
        return 1

    async def touch(self, rids: Iterable[str], *, reader_lease_s: float | None, reader: str) -> dict[str, bool]:
        self.touched += rids
        return {rid: rid in self.texts for rid in rids}

    async def overview(self, pools: Sequence[str]) -> Overview:
        lanes: dict[tuple[str, Lane], LaneState] = {
            (pool, lane): LaneState(waiting=len(self.jobs)) for pool in pools for lane in LANES
        }
        return Overview(dict.fromkeys(COUNTERS, 0), lanes, len(self.jobs), 0.0, 0, 0, self.shards, 0, 0.0)

    async def leave(self, rids: Iterable[str], *, grace_s: float, reader: str) -> None:
        self.left += [(rid, grace_s) for rid in rids]

    @asynccontextmanager
    async def follow(self, rids: Iterable[str]) -> AsyncIterator[AsyncIterator[TextChunk]]:
        yield self._read(tuple(rids))

    async def _read(self, rids: tuple[str, ...]) -> AsyncIterator[TextChunk]:
        """The choices' chunks in turns."""
        if any(rid not in self.texts for rid in rids):
            raise StreamGone("gone")
        rows = [self.texts[rid] for rid in rids]
        for at in range(max(map(len, rows))):
            for row in rows:
                if at < len(row):
                    await asyncio.sleep(0)
                    yield row[at]
        if any(not row or row[-1].finish is None for row in rows):
            await asyncio.sleep(self.hold_s)

    async def unfinished(self, pool: str | None = None) -> list[str]:
        return [rid for rid, chunks in self.texts.items() if not chunks or chunks[-1].finish is None]

    async def workers(self, pool: str) -> list[ProcessInfo]:
        return [process for process in self.alive_processes if process.role == "worker"]

    async def broadcast(self, pool: str, kind: Kind, args: Mapping[str, Any], wait_s: float) -> Answers:
        self.commands.append((pool, kind, dict(args)))
        workers = await self.workers(pool)
        return Answers({worker.id: self.obey(worker, kind) for worker in workers}, tuple(workers))

    @asynccontextmanager
    async def exclusive(self, pool: str, limit_s: float) -> AsyncIterator[None]:
        yield

    async def all(self) -> dict[str, ModelCard]:
        return self.cards

    def expire(self) -> None:
        pass

    async def get(self, name: str) -> ModelCard:
        if name not in self.cards:
            raise ModelNotFound(f"The model '{name}' does not exist.", param="model")
        return self.cards[name]

    async def blob(self, sha256: str) -> bytes:
        return BLOB

    async def alive(self) -> list[ProcessInfo]:
        return self.alive_processes


def _chunks(rid: str, prompt_tokens: int, steps: Sequence[Step]) -> list[TextChunk]:
    out, offset, tokens, seq = [], 0, 0, 0
    for step in steps:
        tokens += step.tokens
        seq = 1 if step.text else seq + 1
        out.append(
            TextChunk(
                rid, offset, step.text, Usage(prompt_tokens, tokens), seq,
                token_ids=tuple(range(tokens - step.tokens, tokens)), logprobs=step.logprobs,
                prompt_logprobs=step.prompt_logprobs, finish=step.finish,
            )
        )  # fmt: skip
        offset += len(step.text.encode())
    return out


def services(backend: FakeBackend, settings: ApiSettings | None = None) -> Services:
    return build(settings or ApiSettings(), Backend(*[backend] * 5))


def app(backend: FakeBackend, settings: ApiSettings | None = None) -> FastAPI:
    """The application over `backend`."""
    settings = settings or ApiSettings()
    return create_app(settings, services(backend, settings))
