"""Real weights: the engine's greedy tokens are those of transformers' eager float32 model, alone and in mixed batches,
out of the cache, guessed, preempted, taken over.

A part of it runs each time; all 200 prompts of both models, in every manner, are in the long suite.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.kernels.cpu.attention import BLOCK_SIZE
from headrace.shared.messages import LANES, GenerateJob, Lane
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.settings import WorkerSettings
from kit import engines
from kit.prompts import TEXTS
from kit.real_models import FOLDERS, compare, encode, folder_of

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

SMALL_POOL = {"smollm2-135m": "40mb", "gemma3-270m": "20mb"}  # for two or three of the longest prompts, at most
Answers = list[list[int]]


def engine_of(folder: Path, **settings: Any) -> TransformersEngine:
    """With the kernels and weights that a worker has by default, and a budget that cuts prompts into chunks."""
    given: dict[str, Any] = {"device": "cpu", "context_length": 512, "max_running": 16, "max_batch_tokens": 64}
    return TransformersEngine(WorkerSettings(model=str(folder), **(given | settings)))


def mixed(engine: TransformersEngine, prompts: Sequence[list[int]], count: int) -> Answers:
    """Answers to all prompts in one run. A third is batch work, which the others push out when they come."""
    out: dict[str, engines.Generation] = {}
    jobs: dict[Lane, list[GenerateJob]] = {"batch": [], "std": [], "rt": []}
    for number, prompt in enumerate(prompts):
        lane = LANES[number % 3]
        jobs[lane].append(engines.job(str(number), prompt, ignore_eos=False, max_new_tokens=count, lane=lane))
    for one in jobs["batch"]:
        engine.add(one)
    for pair in zip_longest(jobs["std"], jobs["rt"]):
        engines.advance(engine, out)
        for one in filter(None, pair):
            engine.add(one)
    for rid, generation in engines.drain(engine).items():
        out.setdefault(rid, engines.Generation()).token_ids += generation.token_ids
    return [out[str(number)].token_ids for number in range(len(prompts))]


def alone(engine: TransformersEngine, prompts: Sequence[list[int]], count: int) -> Answers:
    jobs = [engines.job("a", prompt, ignore_eos=False, max_new_tokens=count) for prompt in prompts]
    return [engines.run(engine, [job])["a"].token_ids for job in jobs]


def say(name: str, how: str, tally: object) -> None:
    sys.stdout.write(f"{name}, {how}: {tally}\n")


@pytest.fixture(scope="module", params=FOLDERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str) -> Iterator[TransformersEngine]:
    engine = engine_of(folder_of(name), kv_memory=SMALL_POOL[name], speculate=3)
    yield engine
    engine.close()


def test_in_mixed_batches(name: str, engine: TransformersEngine) -> None:
    folder, step = folder_of(name), {"smollm2-135m": 2, "gemma3-270m": 8}[name]
    prompts = encode(folder, TEXTS)[::step]
    answers = mixed(engine, prompts, 8)
    say(name, f"{len(prompts)} prompts in mixed batches", compare(folder, prompts, answers))
    assert engine.stats()["preemptions"] > 0
    whole = [number for number, prompt in enumerate(prompts) if len(prompt) > BLOCK_SIZE]  # others leave no whole block
    assert whole
    for number in sorted(whole, key=lambda number: -len(prompts[number]))[:4]:
        engines.run(engine, [engines.job("w", prompts[number], ignore_eos=False, max_new_tokens=1)])
        again = engines.run(engine, [engines.job("c", prompts[number], ignore_eos=False, max_new_tokens=8)])["c"]
        assert again.cached_tokens
        assert again.token_ids == answers[number]
        engine.add(engines.job("t", prompts[number], ignore_eos=False, max_new_tokens=8), answers[number][:3])
        assert engines.drain(engine)["t"].token_ids == answers[number][3:]


def test_alone_as_generate_says(name: str, engine: TransformersEngine) -> None:
    folder = folder_of(name)
    prompts = encode(folder, TEXTS)[::50]
    answers = alone(engine, prompts, 8)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = engines.reference_model(folder).generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
            )
        assert whole[0, len(prompt) :].tolist() == answer


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_prompts_in_every_manner(name: str) -> None:
    folder, count = folder_of(name), 16
    prompts = encode(folder, TEXTS)
    assert len(prompts) == 200
    engine = engine_of(folder, kv_memory=SMALL_POOL[name])
    answers = mixed(engine, prompts, count)
    say(name, "200 prompts in mixed batches", compare(folder, prompts, answers))
    assert engine.stats()["preemptions"] > 0
    engine.close()
    engine = engine_of(folder, speculate=3)
    assert alone(engine, prompts, count) == answers
    say(name, "alone, guessed", "the same tokens")
    assert mixed(engine, prompts, count) == answers
    say(name, "in mixed batches, out of the cache, guessed", "the same tokens")
    stats = engine.stats()
    assert stats["prefix_hit_tokens"] > 0
    assert stats["accepted_tokens"] > 0
    engine.close()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_prompts_with_torchs_linears(name: str) -> None:
    folder = folder_of(name)
    prompts = encode(folder, TEXTS)
    engine = engine_of(folder, kv_memory=SMALL_POOL[name], weight_dtype="float32", attention_backend="torch")
    say(name, "200 prompts in mixed batches, torch's", compare(folder, prompts, mixed(engine, prompts, 16)))
    engine.close()
