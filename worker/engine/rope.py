"""Rotary frequencies that depend on nothing but the position.

transformers picks the frequencies of `longrope` and `dynamic` by the longest request of a batch, so that a request's
output would change when a long one joins it, and K stored under one set would be read under another. Here they are
picked once, by the context that is served: what transformers takes for a request of that length. Up to the original
context, which is the default, these are its own for every request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_BY_LENGTH = ("longrope", "dynamic")


@torch.no_grad()
def freeze(model: nn.Module, context_length: int) -> int:
    """Fix the frequencies of every rotary module that would choose them by length; returns how many were fixed."""
    count = 0
    for module in model.modules():
        kind: Any = getattr(module, "rope_type", None)
        if isinstance(kind, str) and kind in _BY_LENGTH:
            _fix(module, "", kind, context_length, {})
            module.rope_type = "default"  # type: ignore[assignment]  # which its forward leaves alone
            count += 1
        elif isinstance(kind, dict) and any(value in _BY_LENGTH for value in kind.values()):
            for layer_type, value in kind.items():
                if value in _BY_LENGTH:
                    _fix(module, f"{layer_type}_", value, context_length, {"layer_type": layer_type})
            module.rope_type = dict.fromkeys(kind, "default")  # type: ignore[assignment]
            count += 1
    return count


def _fix(module: Any, prefix: str, kind: str, context_length: int, layer: dict[str, str]) -> None:
    frequencies = getattr(module, f"{prefix}inv_freq")
    fixed, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, frequencies.device, seq_len=context_length, **layer)
    frequencies.copy_(fixed)
    setattr(module, f"{prefix}attention_scaling", scaling)
