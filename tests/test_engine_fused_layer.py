"""Fused decoder layers: which are fused, that they compute the same, and when the layer's own forward runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headrace.worker.engine import fused_layer
from headrace.worker.engine.loader import LoadedModel, load_model
from kit import architectures, engines

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FUSED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")


def load(folder: Path) -> LoadedModel:
    fixed: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "context_length": 64}
    return load_model(folder, **fixed)


def fused_layers(loaded: LoadedModel) -> list[fused_layer.FusedLayer]:
    found: list[Any] = [vars(module).get("forward") for module in loaded.model.modules()]
    stacked = [partial.func.layers[partial.args[0]] for partial in found if hasattr(partial, "func")]
    return stacked or [forward for forward in found if isinstance(forward, fused_layer.FusedLayer)]


@pytest.mark.parametrize("architecture", FUSED)
def test_a_fused_model_still_equals_transformers(architecture: str, tmp_path: Path) -> None:
    architectures.build(tmp_path, architecture)
    loaded = load(tmp_path)
    assert len(fused_layers(loaded)) == len(loaded.layers)
    engine = engines.tiny_engine(tmp_path, block_size=16)
    for number, prompt in enumerate(engines.random_prompts((3, 40, 21), high=200)):
        generation = engines.run(engine, [engines.job(str(number), prompt)])[str(number)]
        assert generation.token_ids == engines.reference(tmp_path, prompt, 8)[0]
    engine.close()


@pytest.mark.parametrize(
    "config",
    [
        transformers.GraniteConfig(residual_multiplier=0.3, **SIZES),
        transformers.SmolLM3Config(no_rope_layers=[1, 0], pad_token_id=0, **SIZES),
        transformers.Ministral3Config(
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 48,  # beyond what the proof at load computes
                "llama_4_scaling_beta": 0.5,
            },
            **SIZES,
        ),
    ],
    ids=["residuals that are scaled", "a layer without positions", "queries that are scaled far into a context"],
)
def test_layers_of_another_shape_keep_their_own_forward(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    assert not fused_layers(load(tmp_path))


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_a_fused_layer_that_is_slightly_wrong_is_not_used(
    weight_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounding weights to int8 may move logits a lot; fusing layers of the same weights may not."""
    architectures.build(tmp_path, "llama")
    compute = fused_layer.FusedLayer.compute

    def off(self: fused_layer.FusedLayer, x: torch.Tensor, angles: Any) -> torch.Tensor:
        return compute(self, x, angles) * (1 + 0.05 * torch.linspace(0, 1, x.shape[-1]))

    monkeypatch.setattr(fused_layer.FusedLayer, "compute", off)
    fixed: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "context_length": 64}
    with caplog.at_level("INFO"):
        loaded = load_model(tmp_path, weight_dtype=weight_dtype, **fixed)  # type: ignore[arg-type]
    assert "keeps its layers' own forward" in caplog.text
    assert fused_layers(loaded) == []
