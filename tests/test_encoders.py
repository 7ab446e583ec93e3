"""Embedding models and classifiers through the whole path: HTTP, queue, worker, detokenizer, and back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from kit import tiny_encoders
from kit.deployment import Deployment
from kit.prompts import PROMPTS
from openai import OpenAI

MINILM = os.environ.get("HEADRACE_TEST_EMBEDDER", "")
TEXTS = [prompt[:120] for prompt in PROMPTS[:48]]


def embeddings(folder: Path, texts: list[str]) -> torch.Tensor:
    """transformers' own: each text alone, the mean of its tokens, at length 1."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_encoders.build(tmp_path_factory.mktemp("model") / "m", "bert", "embed", seed=5)


@pytest.fixture
def deployment(redis_url: str, tmp_path: Path, model: Path) -> Iterator[Deployment]:
    with Deployment(redis_url, tmp_path, model=model) as deployment:
        yield deployment


@pytest.mark.filterwarnings("ignore")
def test_texts_are_embedded_once_each_online_and_in_a_batch_while_workers_die(
    deployment: Deployment, model: Path
) -> None:
    for role in ("api", "detok", "batch"):
        deployment.start(role)
    workers = [deployment.start("worker", "--lease-s", "2") for _ in range(2)]
    deployment.ready()
    wanted = embeddings(model, TEXTS)
    with OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": text}}
            for i, text in enumerate(TEXTS)
        ]
        file = client.files.create(file=("in.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        workers[0].kill()
        found = client.embeddings.create(model="m", input=TEXTS)
        torch.testing.assert_close(torch.tensor([d.embedding for d in found.data]), wanted, atol=1e-5, rtol=0)
        for _ in range(600):
            batch = client.batches.retrieve(batch.id)
            if batch.status in ("completed", "failed"):
                break
            time.sleep(0.1)
        assert batch.status == "completed", batch
        assert batch.output_file_id is not None
        rows = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(row["custom_id"]) for row in rows) == list(range(len(TEXTS)))
    for row in rows:
        vector = torch.tensor(row["response"]["body"]["data"][0]["embedding"])
        torch.testing.assert_close(vector, wanted[int(row["custom_id"])], atol=1e-5, rtol=0)


def test_a_classifier_is_served(redis_url: str, tmp_path: Path) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "distilbert", "classify", id2label={0: "a", 1: "b", 2: "c"})
    with Deployment(redis_url, tmp_path, model=folder) as deployment:
        for role in ("api", "detok", "worker"):
            deployment.start(role)
        deployment.ready()
        body = httpx.post(f"{deployment.url}/classify", json={"text": ["hello", "world"]}, timeout=60).json()
        assert [item["labels"] for item in body] == [["a", "b", "c"]] * 2
        assert all(abs(sum(item["scores"]) - 1) < 1e-6 for item in body)
        refused = httpx.post(f"{deployment.url}/generate", json={"text": "hello"}, timeout=60)
        assert refused.status_code == 400
        assert "it classifies texts" in refused.json()["error"]["message"]


@pytest.mark.model
@pytest.mark.skipif(not MINILM and not os.environ.get("CI"), reason="HEADRACE_TEST_EMBEDDER names no model")
def test_minilm_embeds_as_transformers_does(redis_url: str, tmp_path: Path) -> None:
    texts = [prompt[:300] for prompt in PROMPTS[:16]]
    with Deployment(redis_url, tmp_path, model=Path(MINILM)) as deployment:
        for role in ("api", "detok", "worker"):
            deployment.start(role)
        deployment.ready()
        with OpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
            found = client.embeddings.create(model="m", input=texts)
    got = torch.tensor([item.embedding for item in found.data])
    torch.testing.assert_close(got, embeddings(Path(MINILM), texts), atol=1e-5, rtol=0)
