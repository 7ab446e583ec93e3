"""Rewrites of a loaded model that change nothing but its speed.

Linears are packed by `linear`; here are the norms: one operation instead of six.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.cpu.norm import rms_norm

# How far the fused norm may be from the model's own on unit-sized values: rounding, and nothing that a different
# formula (a missing weight, another epsilon) could hide behind.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class FusedRMSNorm(nn.RMSNorm):
    """torch's own."""

    folds_one = False  # whether its weight is 1 + that of the checkpoint


class CpuRMSNorm(FusedRMSNorm):
    """The compiled kernel in the place of torch's five operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        return rms_norm(x.contiguous(), self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replace each RMSNorm of a model by torch's fused one where both compute the same; returns how many.

    Names tell which modules to try, numbers decide: conventions differ (weight, or 1 + weight), and a module that
    does more than normalise is left alone.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not type(child).__name__.endswith("RMSNorm") or isinstance(child, nn.RMSNorm):
                continue
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(norm: nn.Module) -> nn.RMSNorm | None:
    weight = getattr(norm, "weight", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    if weight.dtype not in _TOLERANCE or len(inspect.signature(norm.forward).parameters) != 1:
        return None
    scales = torch.tensor([[1e-3], [1.0], [30.0]], dtype=weight.dtype, device=weight.device)  # small: epsilon counts
    x = torch.linspace(-1.7, 1.9, weight.numel(), device=weight.device).to(weight.dtype) * scales
    wanted = norm(x)
    # 1 + weight would be rounded once more in half precision, so it is folded in float32 only.
    candidates = [weight.detach()] + ([1.0 + weight.detach()] if weight.dtype == torch.float32 else [])
    for candidate in candidates:
        got = F.rms_norm(x, weight.shape, candidate, epsilon)
        if got.dtype == wanted.dtype and torch.allclose(got, wanted, rtol=_TOLERANCE[weight.dtype], atol=1e-6):
            kind = CpuRMSNorm if (weight.device.type, weight.dtype) == ("cpu", torch.float32) else FusedRMSNorm
            fused = kind(weight.numel(), eps=epsilon, device=weight.device, dtype=weight.dtype)
            fused.weight = nn.Parameter(candidate, requires_grad=False)
            fused.folds_one = candidate is not candidates[0]
            return fused
    return None
