"""With --deterministic on a GPU an answer's bytes are its own, while requests run together.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from headrace.worker.engine.engine import TransformersEngine
from kit import engines, tiny_models
from kit.interpreter import order_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Odd sizes, biases, windows and softcaps, and a model with other norms and activations.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 100, "num_hidden_layers": 1},
    "qwen3": {"attention_bias": True, "num_hidden_layers": 1},
    "gemma2": {},
    "gpt2": {"n_layer": 1},
}


@pytest.fixture(autouse=True)
def _ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    order_products(monkeypatch)


def engine_of(folder: Path, **settings: Any) -> TransformersEngine:
    given = {"device": DEVICE, "attention_backend": "triton", "deterministic": True, "max_batch_tokens": 64}
    return engines.tiny_engine(folder, **(given | settings))


def told(generation: engines.Generation) -> tuple[Any, ...]:
    return generation.token_ids, generation.logprobs


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in MODELS if name != "llama")]
)
def test_bytes_are_a_requests_own(architecture: str, tmp_path: Path) -> None:
    folder = tiny_models.build(tmp_path / "m", architecture, **MODELS[architecture])
    prompts = engines.random_prompts((18, 3, 7))
    watched, *others = (
        engines.job(str(i), prompt, max_new_tokens=2, top_logprobs=5) for i, prompt in enumerate(prompts)
    )
    engine = engine_of(folder)
    assert not engine._scheduler.fixed_chunks
    alone = engines.run(engine, [watched])["0"]
    assert alone.token_ids == engines.reference(folder, prompts[0], 2)[0]
    cached = engines.run(engine, [watched])["0"]
    assert cached.cached_tokens
    assert told(cached) == told(alone)
    assert told(engines.run(engine, [*others, watched])["0"]) == told(alone)
    engine.close()
    chunked = engine_of(folder, max_batch_tokens=9)
    assert told(engines.run(chunked, [others[0], watched])["0"]) == told(alone)
    chunked.close()


def test_a_model_with_other_products_is_computed_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The experts multiply by torch's own operations, and its router, too."""
    folder = tiny_models.build(tmp_path / "m", "qwen3_moe", num_hidden_layers=1)
    caplog.set_level("INFO")
    engine = engine_of(folder)
    assert engine._scheduler.fixed_chunks
    assert "each sequence is computed alone" in caplog.text
    engine.close()
