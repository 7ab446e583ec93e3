"""Decoder layers of llama, mistral, qwen, gemma and their kin: which modules are of that shape, and another forward for
those that are.

Names tell which layers to try, `trial` whether a model of them still computes what it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
NORMS = {"input_layernorm", "post_attention_layernorm"}
OUTER_NORMS = {"pre_feedforward_layernorm", "post_feedforward_layernorm"}

# What the forwards of these layers and of their attention name. One that names more may do what the proof's few short
# prompts do not show: scale queries far into a context (ministral3), clamp what is large.
_NAMES = {
    *("self_attn", "mlp", *NORMS, *OUTER_NORMS, *ATTENTION, *HEAD_NORMS, "apply_rotary_pos_emb", "layer_idx"),
    *("shape", "view", "reshape", "transpose", "contiguous", "update", "config", "getattr", "training", "head_dim"),
    *("ALL_ATTENTION_FUNCTIONS", "get_interface", "_attn_implementation", "eager_attention_forward"),
    *("scaling", "sliding_window", "attention_dropout", "attn_logit_softcapping"),
}


def install(model: nn.Module, fused: Callable[[Any], Callable[..., Any] | None]) -> list[nn.Module]:
    """Give layers of the known shape the forward that `fused` makes for them, where it makes one; returns those."""
    installed = []
    for layer in model.modules():
        if "forward" in vars(layer) or not _known(layer) or (forward := fused(layer)) is None:
            continue
        layer.forward = forward
        installed.append(layer)
    return installed


def remove(layers: list[nn.Module]) -> None:
    """Give layers their own forward back."""
    for layer in layers:
        del layer.forward


def _known(layer: Any) -> bool:
    inner = {"self_attn", "mlp"} | NORMS
    if {name for name, _ in layer.named_children()} not in (inner, inner | OUTER_NORMS):
        return False
    parts = {name for name, _ in layer.self_attn.named_children()}
    if parts - {"rotary_emb"} not in (ATTENTION, ATTENTION | HEAD_NORMS):
        return False
    return (_named(layer) | _named(layer.self_attn)) <= _NAMES


def _named(module: nn.Module) -> set[str]:
    """The attributes and globals in a module's forward."""
    forward: Any = inspect.unwrap(type(module).forward)
    return set(forward.__code__.co_names)
