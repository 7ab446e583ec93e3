"""Batches without models: an answerer that does as it is told, and drivers over real stores."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import openai
import orjson
import redis
from headrace.api.batches.driver import BatchDriver
from headrace.api.batches.model import Batch
from headrace.api.batches.settings import BatchSettings
from headrace.api.batches.stores import open_stores
from headrace.api.batches.window import LineRequest
from headrace.shared.errors import EngineError, InvalidRequest, Overloaded
from headrace.shared.model_card import ModelCard

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"


def line(custom_id: object, content: str = "hi", **changes: Any) -> bytes:
    """One line of an input file."""
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    request = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | changes
    return orjson.dumps(request, option=orjson.OPT_APPEND_NEWLINE)


def lines(count: int, content: Callable[[int], str] = "say {}".format) -> bytes:
    return b"".join(line(f"c{i}", content(i)) for i in range(count))


class OneModel:
    """A registry that knows the model `m`."""

    async def all(self) -> dict[str, ModelCard]:
        return {"m": ModelCard(name="m", pool="m", tokenizer="", context_length=64, vocab_size=8)}


class EchoAnswerer:
    """Answers with the content it was sent. Words in the content decide what happens:

    bad (a 400), broken (an engine error), bug (an exception nobody expected), full (refused once, then answered),
    wait (answers only once `gate` is set).
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.submitted: Counter[str] = Counter()
        self.abandoned: set[str] = set()
        self.most_at_once = 0
        self._now = 0

    async def answer(self, request: LineRequest) -> tuple[str, dict[str, Any]]:
        self.submitted[request.seed] += 1
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            return await self._answer(request)
        finally:
            self._now -= 1

    async def _answer(self, request: LineRequest) -> tuple[str, dict[str, Any]]:
        content = request.body["messages"][0]["content"]
        await asyncio.sleep(0)
        if "bad" in content:
            raise InvalidRequest("no such thing", param="messages")
        if "broken" in content:
            raise EngineError("the engine failed")
        if "bug" in content:
            raise ZeroDivisionError
        if "full" in content and self.submitted[request.seed] == 1:
            raise Overloaded("full", retry_after_s=0)
        if "wait" in content:
            await self.gate.wait()
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        return "req_x", {"object": "chat.completion", "content": content, "usage": usage}

    async def abandon(self, request: LineRequest) -> None:
        self.abandoned.add(request.seed)


@asynccontextmanager
async def driver(
    settings: BatchSettings, answerer: EchoAnswerer, draining: Callable[[], bool] = lambda: False
) -> AsyncIterator[BatchDriver]:
    """A driver over real stores."""
    async with open_stores(settings) as stores:
        yield BatchDriver(stores.batches, answerer, OneModel(), settings, draining)


async def drive_to_end(settings: BatchSettings, batch_id: str, answerer: EchoAnswerer, slices: int = 200) -> Batch:
    """Drive slice after slice, each with a driver of its own, as after a restart."""
    for _ in range(slices):
        async with driver(settings, answerer) as one:
            batch = await one.drive(batch_id)
        assert batch is not None, "somebody else holds the batch"
        if batch.ended:
            return batch
    raise AssertionError(f"not ended after {slices} slices")


def create(client: openai.OpenAI, data: bytes, **more: Any) -> Any:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more)


def drive(settings: BatchSettings, batch_id: str, answerer: EchoAnswerer | None = None) -> Batch:
    return asyncio.run(drive_to_end(settings, batch_id, answerer or EchoAnswerer()))


def read(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """A result file by custom_id, each of which it holds once."""
    if file_id is None:
        return {}
    records = [json.loads(raw) for raw in client.files.content(file_id).read().splitlines()]
    assert len({record["id"] for record in records}) == len(records)
    by_id = {record["custom_id"]: record for record in records}
    assert len(by_id) == len(records)
    return by_id


def completed(client: openai.OpenAI, batch_id: str) -> int:
    """How many lines clients see as answered."""
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed


def counts(batch: Any) -> tuple[int, int, int]:
    c = batch.request_counts
    return c.total, c.completed, c.failed


def set_field(settings: BatchSettings, batch_id: str, name: str, value: object) -> None:
    with redis.Redis.from_url(settings.redis_url) as store:
        store.hset(f"hr:batch:{batch_id}", name, json.dumps(value))


async def eventually(check: Callable[[], bool]) -> None:
    """Wait until `check`, which may block, is true."""
    for _ in range(600):
        if await asyncio.to_thread(check):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to pass")
