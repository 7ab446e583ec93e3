"""Decoder architectures of transformers equal its eager forward or are refused: docs/architectures.md says which."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headrace.worker.engine.rope import freeze
from kit import engines, sweep, tiny_models

TABLE = sweep.read_table()
WORKS = [name for name, row in TABLE.items() if row.verdict == "works"]
REFUSED = [name for name, row in TABLE.items() if row.verdict == "refused"]
_RANDOM = random.Random(os.environ["HEADRACE_TEST_SEED"])  # other samples in each run
SIXTY = sorted(_RANDOM.sample(WORKS, 60))
SIX = sorted(_RANDOM.sample(REFUSED, 6))

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about options of models that are seldom loaded


def test_the_table_has_every_architecture() -> None:
    assert list(TABLE) == sweep.every_architecture()
    assert len(WORKS) >= 100


@pytest.mark.parametrize("architecture", SIXTY)
def test_one_that_works_equals_transformers(architecture: str) -> None:
    assert sweep.outcome(architecture) == TABLE[architecture]


@pytest.mark.parametrize("architecture", SIX)
def test_one_that_is_refused_says_why(architecture: str) -> None:
    outcome, row = sweep.outcome(architecture), TABLE[architecture]
    assert outcome.verdict == "refused"
    assert outcome.reason.partition(":")[0] == row.reason.partition(":")[0]  # then come layers or measured distances


@pytest.mark.long
@pytest.mark.parametrize("architecture", TABLE)
def test_every_architecture_is_what_the_table_says(architecture: str) -> None:
    assert sweep.outcome(architecture).verdict == TABLE[architecture].verdict


LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize(("architecture", "rope"), [("phi3", LONGROPE), ("llama", LONGROPE), ("llama", DYNAMIC)])
@pytest.mark.parametrize("context_length", [0, 128])
def test_rotary_scaling_by_length_does_not_depend_on_the_batch(
    tmp_path: Path, architecture: str, rope: dict[str, Any], context_length: int
) -> None:
    positions = 128 if rope["rope_type"] == "longrope" else 64
    folder = tiny_models.build(
        tmp_path / "m", architecture, rope_parameters=rope, max_position_embeddings=positions,
        original_max_position_embeddings=64,
    )  # fmt: skip
    engine = engines.tiny_engine(folder, context_length=context_length)
    assert engine.card.context_length == (context_length or 64)
    # Of each length that transformers computes with this set: all of them up to the original context; beyond it only
    # the full context, for its own choice changes on the way.
    lengths = (7, 33, 60) if not context_length else (context_length - 1, context_length - 1)
    prompts = engines.random_prompts(lengths)
    out = engines.run(engine, [engines.job(str(i), p, max_new_tokens=1) for i, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        filled = prompt if not context_length else [*prompt, 5]
        logits = _eager_logits(folder, filled)[len(prompt) - 1]
        assert out[str(number)].token_ids == [int(logits.argmax())]


@torch.inference_mode()
def _eager_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = engines.reference_model.__wrapped__(folder)  # its frequencies change with what it has seen: a new one
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_frozen_frequencies_stay(tmp_path: Path) -> None:
    folder = tiny_models.build(
        tmp_path / "m", "phi3", rope_parameters=LONGROPE, max_position_embeddings=128,
        original_max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rotary = model.model.rotary_emb
    short = rotary.inv_freq.clone()
    assert freeze(model, 64) == 1
    rotary(torch.zeros(1), torch.tensor([[100]]))
    assert torch.equal(rotary.inv_freq, short)
    rotary.rope_type = "longrope"
    assert freeze(model, 65) == 1
    assert not torch.equal(rotary.inv_freq, short)
