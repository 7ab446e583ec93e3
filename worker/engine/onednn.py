"""A model's linears in oneDNN's own layout, which its matrix instructions (AMX, avx512_bf16) read without a copy.

torch's plain linear lays out its weights anew in each call that is not large. The operations are torch's, but private
(they serve its compiler), so that each linear is compared with the one it replaces.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

log = logging.getLogger(__name__)

_ROWS = 16  # for which oneDNN chooses the layout; it serves any number
# How far an output may be from torch's, as a share of all outputs' length.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def supported() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU by instructions of its own."""
    return hasattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported") and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class OneDnnLinear(nn.Module):
    """x @ weight.T (+ bias). Takes the place of an `nn.Linear` and has its public attributes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        # A plain attribute, not a buffer: nobody may cast or move it, and it is in no state dict.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> torch.Tensor:
        """[N, K], made anew each time."""
        dense: torch.Tensor = self._packed.to_dense()
        return dense


@torch.inference_mode()
def pack(model: nn.Module) -> int:
    """Replace a CPU model's linears where the new one computes the same; returns how many."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and (packed := _packed(child)) is not None:
                setattr(parent, name, packed)
                count += 1
    return count


def _packed(linear: nn.Linear) -> OneDnnLinear | None:
    x = torch.linspace(-1.7, 1.9, 3 * linear.in_features).view(3, -1).to(linear.weight.dtype)
    wanted = linear(x).float()
    try:
        packed = OneDnnLinear(linear)
        got = packed(x).float()
    except (RuntimeError, NotImplementedError) as e:
        log.info("a linear keeps torch's layout: %s", str(e).partition("\n")[0])
        return None
    near = float((got - wanted).norm()) <= _TOLERANCE[linear.weight.dtype] * float(wanted.norm())
    return packed if near else None
