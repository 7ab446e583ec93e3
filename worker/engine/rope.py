"""Rotary frequencies that depend on nothing but the position.

transformers picks the frequencies of `longrope` and `dynamic` by the longest request of a batch, so that a request's
output would change when a long one joins it, and K stored under one set would be read under another. Here they are
picked once, by the context that is served: what transformers takes for a request of that length. Up to the original
context, which is the default, these are its own for every request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...kernels.cpu.rotary import rotate
from .rebind import ROTARY, rebind

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


def fuse(model: nn.Module) -> int:
    """Let a CPU model's attention turn queries and keys by one kernel, where its own function computes what that does;
    returns how many modules do."""
    return rebind(model, ROTARY, lambda original: _fused(original) if _turns_halves(original) else None)


@torch.inference_mode()
def _turns_halves(function: Callable[..., Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, cos, sin = (
        torch.randn(shape, generator=generator) for shape in ((1, 4, 3, 8), (1, 2, 3, 8), (1, 3, 8), (1, 3, 8))
    )
    try:
        wanted = function(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    got = rotate(q[0], k[0], cos[0], sin[0])
    return len(wanted) == 2 and all(
        a.shape == b[None].shape and torch.allclose(a, b[None], atol=1e-5) for a, b in zip(wanted, got, strict=True)
    )


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        fits = not args and not kwargs and cos.shape == (1, q.shape[-2], q.shape[-1]) and q.shape[0] == 1
        if not fits or any(t.dtype != torch.float32 or t.device.type != "cpu" or t.stride(-1) != 1 for t in (q, k)):
            return original(q, k, cos, sin, *args, **kwargs)
        turned = rotate(q[0], k[0], cos[0].contiguous(), sin[0].contiguous())
        return turned[0][None], turned[1][None]

    return apply
