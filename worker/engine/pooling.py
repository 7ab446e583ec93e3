"""From the hidden states of a text to its embedding: what a folder's sentence-transformers files say.

modules.json                the chain: a Transformer, a Pooling, perhaps Dense layers, perhaps a Normalize
1_Pooling/config.json       which pooling
2_Dense/config.json         sizes and activation of a linear layer, its weights beside it
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from ...shared.errors import ModelRefused
from ..settings import WorkerSettings

Pooling = Literal["mean", "cls", "last"]
_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS: dict[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Turns hidden states into embeddings."""

    pooling: Pooling
    normalize: bool
    layers: nn.Sequential

    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Embeddings of a batch.

        Args:
            hidden: [B, L, D]; a text's tokens come first, padding behind them.
            lengths: [B] int64, tokens of each text.

        Returns:
            [B, D'] float32.
        """
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif self.pooling == "last":
            pooled = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
        else:
            inside = torch.arange(hidden.shape[1], device=hidden.device)[None, :] < lengths[:, None]
            pooled = (hidden.float() * inside[:, :, None]).sum(1) / lengths[:, None]
        out: torch.Tensor = self.layers(pooled.float())
        return F.normalize(out, dim=-1) if self.normalize else out


def read_pooler(folder: Path, settings: WorkerSettings, *, default: Pooling, device: torch.device) -> Pooler:
    """The pooler of a model folder; the settings go before its files, and `default` is for a folder without.

    Raises:
        ModelRefused: a module or a pooling that is not understood.
    """
    modules = _read(folder / "modules.json", folder) if (folder / "modules.json").is_file() else []
    pooling, normalize, layers = default, not modules, []
    for module in modules:
        kind, place = str(module["type"]).rpartition(".")[2], folder / str(module["path"])
        if kind == "Pooling":
            pooling = _pooling(_read(place / "config.json", folder), folder, settings)
        elif kind == "Dense":
            layers += _dense(place, folder)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelRefused(
                f"--model {folder}: modules.json names a {kind}; an embedding model may have Transformer, Pooling, "
                "Dense and Normalize"
            )
    if settings.pooling != "auto":
        pooling = settings.pooling
    if settings.normalize != "auto":
        normalize = settings.normalize == "yes"
    return Pooler(pooling, normalize, nn.Sequential(*layers).to(device).eval().requires_grad_(False))


_NAMED: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "last": "last"}


def _pooling(config: dict[str, Any], folder: Path, settings: WorkerSettings) -> Pooling:
    named = config.get("pooling_mode")
    asked = {name for name, value in config.items() if name.startswith("pooling_mode_") and value is True}
    modes: list[Pooling] = [mode for flag, mode in _FLAGS.items() if flag in asked] if named is None else []
    if isinstance(named, str) and named in _NAMED:
        return _NAMED[named]
    if len(modes) == len(asked) == 1:
        return modes[0]
    if settings.pooling != "auto":
        return settings.pooling
    wanted = named or ", ".join(sorted(asked)) or "nothing"
    raise ModelRefused(
        f"--model {folder}: its pooling is {wanted}, and this release has mean, cls and last; "
        "--pooling (HEADRACE_POOLING) chooses one of them"
    )


def _dense(place: Path, folder: Path) -> list[nn.Module]:
    config = _read(place / "config.json", folder)
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    weights = place / "model.safetensors"
    if name not in _ACTIVATIONS or not weights.is_file():
        what = f"the activation {name}" if name not in _ACTIVATIONS else "no model.safetensors"
        raise ModelRefused(f"--model {folder}: its dense layer {place.name} has {what}, which is not served")
    linear = nn.Linear(int(config["in_features"]), int(config["out_features"]), bias=bool(config.get("bias", True)))
    state = {key.removeprefix("linear."): value for key, value in safetensors.torch.load_file(weights).items()}
    try:
        linear.load_state_dict(state)
    except RuntimeError as e:
        raise ModelRefused(f"--model {folder}: its dense layer {place.name} does not fit its config.json: {e}") from e
    return [linear.float(), _ACTIVATIONS[name]()]


def _read(path: Path, folder: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelRefused(f"--model {folder}: {path.relative_to(folder)} cannot be read: {e}") from e
