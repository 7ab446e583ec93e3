"""What a request draws follows from its seed: whatever runs beside it, after a restart, and from worker to worker."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from headrace.shared.messages import GenerateJob
from kit import engines, tiny_models

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limited": {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "temperature": 1.4},
    "penalised": {"frequency_penalty": 1.1, "repetition_penalty": 1.3, "logit_bias": ((70, 4.0), (71, -100.0))},
    "grammar": {"regex": "([a-z]{2,5} ){9,}", "presence_penalty": 0.5},
    "banned": {"bad_words": ((70,), (71, 72)), "stop_token_ids": (73, 74), "min_new_tokens": 15},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("seeds") / "m")


def jobs() -> list[GenerateJob]:
    common: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False, "max_new_tokens": 24}
    prompts = engines.random_prompts([9, 30, 5, 14, 22])
    return [
        engines.job(name, prompt, sampling_seed=seed, **(common | kind))
        for seed, ((name, kind), prompt) in enumerate(zip(KINDS.items(), prompts, strict=True))
    ]


def test_alone_together_and_after_a_restart(folder: Path) -> None:
    first, second = engines.tiny_engine(folder), engines.tiny_engine(folder, max_batch_tokens=9, max_running=3)
    together = {rid: one.token_ids for rid, one in engines.run(first, jobs()).items()}
    for job in reversed(jobs()):
        assert engines.run(second, [job])[job.rid].token_ids == together[job.rid]
    others = [engines.job("greedy", (5, 6)), *reversed(jobs())]
    again = engines.run(second, others)
    assert {rid: again[rid].token_ids for rid in together} == together
    assert len({tuple(ids) for ids in together.values()}) == len(together)


def test_guessing_ahead_changes_nothing(folder: Path) -> None:
    plain, guessing = engines.tiny_engine(folder), engines.tiny_engine(folder, speculate=3)
    repeated = [dataclasses.replace(job, input_ids=job.input_ids * 4) for job in jobs()]  # so that there is to guess
    whole = {rid: one.token_ids for rid, one in engines.run(plain, repeated).items()}
    assert {rid: one.token_ids for rid, one in engines.run(guessing, repeated).items()} == whole


def test_taken_over_at_every_token(folder: Path) -> None:
    first, second = engines.tiny_engine(folder), engines.tiny_engine(folder)
    whole = {rid: one.token_ids for rid, one in engines.run(first, jobs()).items()}
    for cut in range(1, 24, 4):
        for job in jobs():
            second.add(job, whole[job.rid][:cut])
        rest = engines.drain(second)
        assert {rid: ids[:cut] + rest[rid].token_ids for rid, ids in whole.items()} == whole
