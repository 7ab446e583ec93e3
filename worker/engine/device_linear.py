"""A GPU model's linears: merged where they read the same input, and batch-invariant where that is asked for.

q_proj, k_proj, v_proj     one product; each module hands out its columns of it
gate_proj, up_proj, act    one product, then act(gate) * up in one kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...kernels import matmul
from .together import Together

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # x, weight, bias


def multiply_for(invariant: bool) -> Multiply:
    """torch's linear, or ours whose rows are bit for bit the same in every batch."""
    return matmul.linear if invariant else F.linear


class InvariantLinear(nn.Linear):
    """x @ weight.T + bias; a row is bit for bit the same whatever stands beside it."""

    @classmethod
    def of(cls, linear: nn.Linear | Conv1D) -> InvariantLinear:
        """In the place of `linear`. Its weight stays the same tensor, so that tied ones stay tied."""
        weight = linear.weight if isinstance(linear, nn.Linear) else nn.Parameter(linear.weight.T.contiguous(), False)
        out_features, in_features = weight.shape
        made = cls(in_features, out_features, bias=linear.bias is not None, device="meta")
        made.weight, made.bias = weight, linear.bias
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return matmul.linear(input, self.weight, self.bias)


def make_invariant(parent: nn.Module) -> int:
    """Replace a module's own linears; returns how many."""
    found = [(name, child) for name, child in parent.named_children() if type(child) in (nn.Linear, Conv1D)]
    for name, child in found:
        assert isinstance(child, (nn.Linear, Conv1D))
        setattr(parent, name, InvariantLinear.of(child))
    return len(found)


class PartLinear(nn.Linear):
    """A linear whose output is a range of columns of a common product. Its weight is a view of the product's."""

    def __init__(
        self, product: Together, part: int, start: int, stop: int, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(weight.shape[1], stop - start, bias=bias is not None, device="meta")
        self.weight = nn.Parameter(weight[start:stop], requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias[start:stop], requires_grad=False)
        self.product, self.part, self.start, self.stop = product, part, start, stop

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product.of(input, self.part)[..., self.start : self.stop]


def merge(parent: nn.Module, names: Sequence[str], multiply: Multiply) -> bool:
    """Make one product of a module's linears `names`, where they can be; returns whether."""
    linears = [getattr(parent, name, None) for name in names]
    plain = [linear for linear in linears if type(linear) is nn.Linear]  # a subclass may compute anything
    if len(plain) < len(names):
        return False
    if len({(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in plain}) > 1:
        return False
    weights: list[torch.Tensor] = [linear.weight for linear in plain]
    biases: list[torch.Tensor] = [linear.bias for linear in plain if linear.bias is not None]
    weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
    product, start = Together(lambda x: multiply(x, weight, bias), len(plain)), 0
    for part, (name, linear) in enumerate(zip(names, plain, strict=True)):
        stop = start + linear.out_features
        setattr(parent, name, PartLinear(product, part, start, stop, weight, bias))
        start = stop
    return True


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)), the first two as one product and the rest of it as one kernel."""

    def __init__(self, mlp: Any, gated: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_proj: PartLinear = mlp.gate_proj
        self.up_proj: PartLinear = mlp.up_proj
        self.down_proj = mlp.down_proj
        self._gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        size = gate.shape[-1]
        if up.data_ptr() == gate.data_ptr() + size * gate.element_size() and up.stride() == gate.stride():
            # Columns of one product, changed in place where hooks did so: the kernel reads the whole.
            whole = gate.as_strided((*gate.shape[:-1], 2 * size), gate.stride(), gate.storage_offset())
        else:  # a hook has put something else in their place
            whole = torch.cat([gate, up], -1)
        out: torch.Tensor = self.down_proj(self._gated(whole))
        return out
