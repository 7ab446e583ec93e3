"""On a CPU an answer's bytes depend on the request alone: not on neighbours, chunks, cache, threads or takeovers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.shared.messages import GenerateJob
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.loader import load_model
from headrace.worker.settings import WorkerSettings
from kit import architectures, engines
from kit.real_models import folder_of

TINY = ("llama", "qwen3", "gemma2", "gpt2")
LENGTHS = (3, 40, 11, 26, 70, 17, 1, 33)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def engine_of(folder: Path, **settings: Any) -> TransformersEngine:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_memory": "64mb", "max_running": 32}
    given["max_batch_tokens"] = 512
    given.update(settings)
    return TransformersEngine(WorkerSettings(model=f"m={folder}", **given))


def assert_independent(folder: Path, watched: GenerateJob, others: list[GenerateJob], **settings: Any) -> None:
    """`watched` gives the same tokens and the same log-probabilities, bit for bit, however it comes to be computed."""
    torch.set_num_threads(1)
    engine = engine_of(folder, **settings)
    alone = engines.run(engine, [watched])["w"]
    cached = engines.run(engine, [watched])["w"]
    assert cached.cached_tokens, "the second time its prompt should be found"
    told = {"out of the cache": cached, "among others": engines.run(engine, [*others, watched])["w"]}
    engine.add(watched, alone.token_ids[:3])
    resumed = engines.drain(engine)["w"]
    assert (resumed.token_ids, resumed.logprobs) == (alone.token_ids[3:], alone.logprobs[3:]), "taken over"
    engine.close()
    for threads, chunk in ((2, 16), (2, 512)):
        torch.set_num_threads(threads)
        engine = engine_of(folder, max_running=16, max_batch_tokens=chunk, **settings)
        told[f"in chunks of {chunk}, {threads} threads"] = engines.run(engine, [*others[:4], watched])["w"]
        engine.close()
    for how, generation in told.items():
        assert (generation.token_ids, generation.logprobs) == (alone.token_ids, alone.logprobs), how


@pytest.mark.parametrize("architecture", TINY)
def test_a_tiny_models_bytes_are_its_own(architecture: str, tmp_path: Path) -> None:
    architectures.build(tmp_path, architecture)
    watched = engines.job("w", [5 + i * 7 % 200 for i in range(60)], max_new_tokens=7, top_logprobs=16)
    prompts = engines.random_prompts(LENGTHS * 4, high=200)[:31]
    others = [engines.job(f"o{i}", prompt, temperature=1.0 * (i % 2)) for i, prompt in enumerate(prompts)]
    assert_independent(tmp_path, watched, others)


def test_the_proof_at_load_says_so(tmp_path: Path) -> None:
    architectures.build(tmp_path, "llama")
    load: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "context_length": 64}
    assert load_model(tmp_path, **load).invariant


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.long)])
def test_a_real_models_bytes_are_its_own(name: str) -> None:
    folder = folder_of(name)
    watched = engines.job("w", [17 + i * 91 % 40_000 for i in range(90)], max_new_tokens=8, top_logprobs=20)
    prompts = engines.random_prompts(LENGTHS * 4, high=40_000)[:31]
    others = [engines.job(f"o{i}", prompt, max_new_tokens=2) for i, prompt in enumerate(prompts)]
    assert_independent(folder, watched, others, context_length=1024)
