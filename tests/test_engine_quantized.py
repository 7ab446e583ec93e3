"""Checkpoints that were quantised before: read by transformers' own quantizers, or refused with what they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headrace.shared.errors import ModelRefused
from headrace.worker.engine import quantized
from headrace.worker.engine.loader import load_model
from kit import engines, tiny_models

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchao, about kernels of other machines


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_torchao_weights_are_served_as_they_are(tmp_path: Path, architecture: str) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    plain = tiny_models.build(tmp_path / "plain", architecture)
    settings: Any = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained
    from_pretrained(plain, dtype=torch.float32, quantization_config=settings).save_pretrained(tmp_path / "int8")
    folder = tmp_path / "int8"
    tiny_models.save_tokenizer(folder)
    prompts = engines.random_prompts((5, 17, 40))
    engine = engines.tiny_engine(folder)
    out = engines.run(engine, [engines.job(str(i), prompt) for i, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert out[str(number)].token_ids == engines.reference(folder, prompt, 8)[0]
    linear = engines.reference_model(folder).model.layers[0].mlp.up_proj
    assert type(linear.weight).__name__ == "Int8Tensor"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "fp8"}, r"quantised by fp8, which is computed on a GPU only; give --device cuda"),
        ({"quant_method": "aqlm"}, r"quantised by aqlm, and the package aqlm is not installed; install it"),
        ({"quant_method": "newest"}, r"quantised by newest, which transformers does not know"),
    ],
)
def test_what_cannot_be_read_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    folder = tiny_models.build(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    monkeypatch.setattr(quantized, "_installed", lambda package: False)
    with pytest.raises(ModelRefused, match=says):
        load_model(folder, dtype=torch.float32, device=torch.device("cpu"), context_length=64)
