"""Random LoRA adapters as PEFT saves them, and the model that one makes when it is merged by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def make(
    folder: Path, model: Path, targets: Sequence[str] = ATTENTION, *, r: int = 4, alpha: float = 8, seed: int = 0,
    std: float = 0.3, **config: Any
) -> Path:  # fmt: skip
    """Save an adapter of `model` for every linear whose last name is one of `targets`."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    ranks: dict[str, int] = config.get("rank_pattern", {})
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if path.split(".")[-1] not in targets:
            continue
        rank = next((value for part, value in ranks.items() if path.endswith(part)), r)
        outputs, inputs = weight.shape if "c_" not in path.split(".")[-1] else weight.T.shape  # GPT-2's Conv1D
        for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            key = f"base_model.model.{path}.lora_{which}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * std
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields = {"peft_type": "LORA", "r": r, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    return folder


def merge(folder: Path, model: Path, adapter: Path) -> Path:
    """Save `model` with every W of the adapter replaced by W + scale * B A."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights, factors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, a in factors.items():
        if ".lora_A." not in key:
            continue
        path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = config.get("alpha_pattern", {})
        alpha = next((value for part, value in alphas.items() if path.endswith(part)), config["lora_alpha"])
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = scale * factors[key.replace("lora_A", "lora_B")] @ a
        name = f"{path}.weight"
        weights[name] = weights[name] + (delta if weights[name].shape == delta.shape else delta.T)
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
