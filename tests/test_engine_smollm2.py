"""Real weights: the engine's tokens equal those of transformers' `generate()`, alone and many at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings
from kit import engines
from tokenizers import Tokenizer

pytestmark = pytest.mark.model

OUTPUT = 16
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 1, 2, 3, 5, 8,",
    "Wasser ist",
    "Water boils at",
    "Dear Sir or Madam,",
    "The three laws of thermodynamics are:\n1.",
    "Q: What is 7 times 8?\nA:",
    "import numpy as np\n",
    "In 1969,",
    "My favourite recipe begins with",
    "🙂 means",
    "SELECT name FROM",
    "To be, or not to be",
    "A headrace is a channel that " + "carries water to the wheel of a mill, and " * 12,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("HEADRACE_TEST_MODEL")
    if not named:
        pytest.skip("HEADRACE_TEST_MODEL names no folder; `headrace fetch smollm2-135m` prints one")
    return Path(named)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    settings = WorkerSettings(
        model=str(folder), device="cpu", dtype="float32", context_length=512, max_running=16, max_batch_tokens=64
    )
    engine = TransformersEngine(settings)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = engines.reference_model(folder)
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT)
        out.append(whole[0, len(prompt) :].tolist())
    return out


def test_alone(engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for prompt, tokens in list(zip(prompts, expected, strict=True))[::4]:
        job = engines.job("a", prompt, ignore_eos=False, max_new_tokens=OUTPUT)
        assert engines.run(engine, [job])["a"].token_ids == tokens


def test_sixteen_at_once(engine: TransformersEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    jobs = [engines.job(str(i), p, ignore_eos=False, max_new_tokens=OUTPUT) for i, p in enumerate(prompts)]
    out = engines.run(engine, jobs)
    assert [out[str(i)].token_ids for i in range(len(prompts))] == expected


def test_again_from_the_cache_with_guesses_in_a_pool_too_small_for_all(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    settings = WorkerSettings(
        model=str(folder),
        device="cpu",
        dtype="float32",
        context_length=512,
        max_running=16,
        max_batch_tokens=64,
        kv_memory="32mb",
        speculate=3,
    )
    engine = TransformersEngine(settings)
    jobs = [engines.job(str(i), p, ignore_eos=False, max_new_tokens=OUTPUT) for i, p in enumerate(prompts)]
    first, again = engines.run(engine, jobs), engines.run(engine, jobs)
    for number, tokens in enumerate(expected):
        assert first[str(number)].token_ids == tokens
        assert again[str(number)].token_ids == tokens
    stats = engine.stats()
    assert stats["prefix_hit_tokens"] > 0
    assert stats["accepted_tokens"] > 0
    engine.close()
