"""Rewrites of a model on a GPU that change nothing but its speed: fewer launches, fewer passes over memory.

    q_proj, k_proj, v_proj     one product, see `device_linear`; so gate_proj and up_proj, with their activation
    …RMSNorm                   one kernel
    apply_rotary_pos_emb       one kernel
    every other linear         left to torch, or our batch-invariant kernel

Names tell what to try, numbers decide: each rewrite is compared with what it replaces, and `loader` proves the whole
model afterwards.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kernels.gated import gelu_tanh_and_mul, silu_and_mul
from ...kernels.rms_norm import rms_norm
from ...kernels.rope import rope
from .device_linear import GatedMLP, Multiply, make_invariant, merge, multiply_for
from .rebind import ROTARY, rebind

log = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@torch.inference_mode()
def fuse(model: nn.Module, *, invariant: bool = False) -> None:
    """Rewrite what is known of `model`, in place.

    Args:
        invariant: multiply by kernels whose rows do not depend on the batch (the deterministic mode).
    """
    counts = dict.fromkeys(("norms", "q/k/v", "gated", "rotary", "invariant linears"), 0)
    multiply = multiply_for(invariant)
    for module in list(model.modules()):
        counts["norms"] += _fuse_norms(module)
        counts["q/k/v"] += merge(module, ("q_proj", "k_proj", "v_proj"), multiply)
        counts["gated"] += _fuse_gated(module, multiply)
    counts["rotary"] = rebind(model, ROTARY, partial(_rotary, like=next(model.parameters())))
    if invariant:
        counts["invariant linears"] = sum(make_invariant(module) for module in list(model.modules()))
    log.info("fused: %s", ", ".join(f"{count} {name}" for name, count in counts.items()))


class DeviceRMSNorm(nn.RMSNorm):
    """RMSNorm by our kernel; `unit_offset` where the model multiplies 1 + weight."""

    def __init__(self, weight: nn.Parameter, epsilon: float, unit_offset: bool) -> None:
        super().__init__(weight.numel(), eps=epsilon, device="meta")
        self.weight = weight
        self.unit_offset = unit_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


def _fuse_norms(parent: nn.Module) -> int:
    count = 0
    for name, child in list(parent.named_children()):
        if type(child).__name__.endswith("RMSNorm") and (fused := _fused_norm(child)) is not None:
            setattr(parent, name, fused)
            count += 1
    return count


def _fused_norm(norm: Any) -> DeviceRMSNorm | None:
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if weight.dtype not in _TOLERANCE or len(inspect.signature(norm.forward).parameters) != 1:
        return None
    scales = torch.tensor([[1e-3], [1.0], [30.0]], dtype=weight.dtype, device=weight.device)  # small: epsilon counts
    x = torch.linspace(-1.7, 1.9, weight.numel(), device=weight.device).to(weight.dtype) * scales
    wanted = norm(x)
    for unit_offset in (False, True):
        fused = DeviceRMSNorm(weight, epsilon, unit_offset)
        if _alike(fused(x), wanted):
            return fused
    return None


def _fuse_gated(parent: nn.Module, multiply: Multiply) -> int:
    count = 0
    children: list[tuple[str, Any]] = list(parent.named_children())
    for name, mlp in children:
        if not {"gate_proj", "up_proj", "down_proj"} <= {child for child, _ in mlp.named_children()}:
            continue
        if (
            len(inspect.signature(mlp.forward).parameters) != 1
            or mlp.gate_proj.out_features != mlp.up_proj.out_features
        ):
            continue
        weight = mlp.gate_proj.weight
        x = torch.linspace(-1.5, 1.5, 3 * weight.shape[1], device=weight.device).to(weight.dtype).view(3, -1)
        wanted = mlp(x)
        if not merge(mlp, ("gate_proj", "up_proj"), multiply):
            continue
        for gated in (silu_and_mul, gelu_tanh_and_mul):
            fused = GatedMLP(mlp, gated)
            if _alike(fused(x), wanted):
                setattr(parent, name, fused)
                count += 1
                break
    return count


def _rotary(original: Callable[..., Any], like: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel in the place of `original`, neox or interleaved as that turns; None where it does neither."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 3, 16), (1, 2, 3, 16), (1, 3, 8))
    q, k, angles = (torch.randn(shape, generator=generator).to(like.device) for shape in shapes)
    for interleaved in (False, True):
        twice = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
        cos, sin = twice.cos(), twice.sin()
        try:
            wanted = original(q, k, cos, sin)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        kernel = Rotary(original, interleaved)
        if all(_alike(got, want) for got, want in zip(kernel(q, k, cos, sin), wanted, strict=True)):
            return kernel
    return None


class Rotary:
    """Our kernel in the place of transformers' function."""

    def __init__(self, original: Callable[..., Any], interleaved: bool) -> None:
        self._original = original
        self.interleaved = interleaved

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        flat = q.dim() == 4 and q.shape[0] == 1 and cos.shape == (1, q.shape[2], q.shape[3])
        if args or kwargs or not flat:
            return self._original(q, k, cos, sin, *args, **kwargs)
        turned = rope(q[0].transpose(0, 1), k[0].transpose(0, 1), cos[0], sin[0], interleaved=self.interleaved)
        return tuple(x.transpose(0, 1)[None] for x in turned)


def _alike(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = _TOLERANCE[wanted.dtype]
    return got.dtype == wanted.dtype and got.shape == wanted.shape and torch.allclose(got, wanted, tolerance, tolerance)
