"""Tokens and distributions equal those of transformers' own eager forward, architecture by architecture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from headrace.worker.engine.engine import TransformersEngine
from kit import engines, tiny_models
from kit.engines import Generation

PROMPT_LENGTHS = (7, 33, 20, 50, 3)
OUTPUT = 6


@pytest.fixture(scope="module", params=tiny_models.ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return engines.random_prompts(PROMPT_LENGTHS)


def assert_equals_reference(folder: Path, prompts: list[list[int]], out: dict[str, Generation]) -> None:
    for number, prompt in enumerate(prompts):
        generation = out[str(number)]
        tokens, logprobs = engines.reference(folder, prompt, OUTPUT)
        assert generation.token_ids == tokens
        for logprob, row in zip(generation.logprobs, logprobs, strict=True):
            ids, values = zip(*logprob.top, strict=True)
            torch.testing.assert_close(torch.tensor(values), row[list(ids)], atol=2e-3, rtol=1e-3)


def test_tokens_and_distributions_over_mixed_batches(
    folder: Path, engine: TransformersEngine, prompts: list[list[int]]
) -> None:
    # 24 tokens a step: chunks of the long prompts share steps with short ones that decode already.
    whole = engine.card.vocab_size
    jobs = [engines.job(str(i), p, max_new_tokens=OUTPUT, top_logprobs=whole) for i, p in enumerate(prompts)]
    assert_equals_reference(folder, prompts, engines.run(engine, jobs))


def test_sequences_go_on_where_another_worker_stopped(
    folder: Path, engine: TransformersEngine, prompts: list[list[int]]
) -> None:
    for number, prompt in enumerate(prompts):
        tokens, _ = engines.reference(folder, prompt, OUTPUT)
        produced = tokens[: 1 + number % 4]
        engine.add(engines.job(str(number), prompt, max_new_tokens=OUTPUT), produced)
        out = engines.drain(engine)[str(number)]
        assert produced + out.token_ids == tokens
        assert out.finish is not None
        assert out.finish.type == "length"


def test_a_pool_too_small_for_all_preempts_and_recomputes(
    folder: Path, engine: TransformersEngine, prompts: list[list[int]]
) -> None:
    # Admission expects half of max_new_tokens; all of them go to the end, so blocks run out on the way.
    small = engines.tiny_engine(folder, context_length=80, kv_memory=str(29 * block_bytes(folder)))
    short = [prompt[:20] for prompt in prompts]
    out = engines.run(small, [engines.job(str(i), p, max_new_tokens=30) for i, p in enumerate(short)])
    assert small._scheduler.preemptions > 0
    for number, prompt in enumerate(short):
        alone = engines.run(engine, [engines.job("alone", prompt, max_new_tokens=30)])["alone"]
        assert out[str(number)].token_ids == alone.token_ids
        assert alone.token_ids[:OUTPUT] == engines.reference(folder, prompt, OUTPUT)[0]


def block_bytes(folder: Path) -> int:
    """Bytes of a block of four tokens: K and V of two layers, heads of 16 float32."""
    config = engines.reference_model(folder).config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return int(4 * 2 * 2 * heads * 16 * 4)
