"""Several processes of each role on one Redis, around a tiny real model: every text is right, online and in a batch."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Server
from kit import tiny_models
from kit.deployment import Deployment
from kit.prompts import PROMPTS
from openai import AsyncOpenAI, OpenAI

MAX_TOKENS = 12
REQUESTS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("model") / "m", "llama")


@pytest.fixture(scope="module")
def deployment(redis_server: Server, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two workers, two detokenizers, three api replicas that share a listening socket, one batch driver."""
    with Deployment(redis_server.url, tmp_path_factory.mktemp("deployment"), model=model) as deployment:
        for role in ("worker", "worker", "detok", "detok", "api", "api", "api", "batch"):
            deployment.start(role, *(("--dtype", "float32") if role == "worker" else ()))
        deployment.ready()
        for _ in range(600):
            listed = httpx.get(f"{deployment.url}/server_info").json()["processes"]
            if sum(process["state"] == "ready" for process in listed) == 8:
                break
            time.sleep(0.1)
        yield deployment


def prompts() -> list[str]:
    """Different ones, short enough for the tiny model's context."""
    words = random.Random(7)
    return [f"{PROMPTS[i % len(PROMPTS)][:40]} {words.randrange(10**6)}" for i in range(REQUESTS)]


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """transformers' greedy continuation of each prompt, as text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = {}
    for prompt in prompts():
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = net.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = out[0, ids["input_ids"].shape[1] :]
        answers[prompt] = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return answers


def body(prompt: str) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS}


async def complete(client: AsyncOpenAI, prompt: str, stream: bool) -> str:
    create: Any = client.completions.create
    if not stream:
        return str((await create(**body(prompt))).choices[0].text)
    chunks = await create(**body(prompt), stream=True)
    return "".join([chunk.choices[0].text async for chunk in chunks if chunk.choices])


def test_two_hundred_at_once_through_every_replica(deployment: Deployment, expected: dict[str, str]) -> None:
    async def all_at_once() -> dict[str, str]:
        async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="x", max_retries=0, timeout=240) as client:
            asked = [complete(client, prompt, stream=i % 2 == 0) for i, prompt in enumerate(expected)]
            return dict(zip(expected, await asyncio.gather(*asked), strict=True))

    assert asyncio.run(all_at_once()) == expected
    served = [p for p in httpx.get(f"{deployment.url}/server_info").json()["processes"] if p["role"] == "detok"]
    assert all(p["extra"]["shards"] for p in served), "both detokenizers hold shards"
    assert "ERROR" not in deployment.logs()


def test_a_batch_of_two_hundred_lines_answers_as_online(
    deployment: Deployment, expected: dict[str, str], tmp_path: Path
) -> None:
    lines = [
        {"custom_id": f"line {i}", "method": "POST", "url": "/v1/completions", "body": body(prompt)}
        for i, prompt in enumerate(expected)
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with OpenAI(base_url=f"{deployment.url}/v1", api_key="x", max_retries=0) as client:
        with path.open("rb") as f:
            file = client.files.create(file=f, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        for _ in range(2400):
            batch = client.batches.retrieve(batch.id)
            if batch.status not in ("validating", "in_progress", "finalizing"):
                break
            time.sleep(0.1)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (REQUESTS, REQUESTS)
        assert batch.output_file_id is not None
        rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert len(rows) == REQUESTS
    texts = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert texts == {f"line {i}": answer for i, answer in enumerate(expected.values())}
