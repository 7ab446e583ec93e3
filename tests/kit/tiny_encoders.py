"""Tiny random embedding models and classifiers, saved as folders that a worker serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import architectures, tiny_models

_ENCODER: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "type_vocab_size": 2}


def build(folder: Path, architecture: str, task: str, *, seed: int = 0, **config: Any) -> Path:
    """Save a model of `architecture` to `task`: embed or classify. `config` overrides configuration fields."""
    import torch
    import transformers

    kind = transformers.CONFIG_MAPPING[architecture]
    fields = {key: value for key, value in architectures.SIZES.items() if kind().to_dict().get(key) is not None}
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": tiny_models.EOS_ID, "sliding_window": 16}
    fields |= {"global_attn_every_n_layers": 2, "local_attention": 16, "n_layers": 2, "n_heads": 4, "dim": 64}
    fields |= {"hidden_dim": 96, "num_hidden_layers": 2, "embedding_size": 64}
    if task == "classify":
        fields |= {"num_labels": 3}
    auto: Any = transformers.AutoModel if task == "embed" else transformers.AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(transformers.AutoConfig.for_model(architecture, **(fields | config))).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tiny_models.save_tokenizer(folder)
    return folder


def add_modules(folder: Path, pooling: str, *, normalize: bool = True, dense: tuple[int, int] | None = None) -> None:
    """The files of sentence-transformers: `pooling` is a flag such as pooling_mode_mean_tokens."""
    import safetensors.torch
    import torch

    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir()
    flags = dict.fromkeys(("pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_lasttoken"), False)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags | {pooling: True}))
    if dense:
        modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
        (folder / "2_Dense").mkdir()
        sizes = {"in_features": dense[0], "out_features": dense[1], "bias": True}
        config = sizes | {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(3)
        weights = {"linear.weight": torch.randn(dense[1], dense[0], generator=generator) * 0.1}
        weights["linear.bias"] = torch.randn(dense[1], generator=generator) * 0.1
        safetensors.torch.save_file(weights, folder / "2_Dense" / "model.safetensors")
    if normalize:
        modules.append({"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"})
    rows = [{"idx": i, "name": str(i), **module} for i, module in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(rows))
