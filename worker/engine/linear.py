"""A CPU model's linears, with weights packed for our kernels: two bytes each where that loses nothing.

Names tell what to try, numbers decide: `loader` proves the whole model against transformers' own logits afterwards.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...kernels.cpu import linear as kernels
from ...kernels.cpu.gate import activate
from ...kernels.cpu.panels import PANEL

WeightDtype = Literal["auto", "float32", "bfloat16", "int8"]

# Linears of one input that become one product, in the order of their outputs.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


class PackedLinear(nn.Module):
    """x @ weight.T (+ bias) in float32. Takes the place of an `nn.Linear` and has its public attributes."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    padded_bias: torch.Tensor | None

    def __init__(
        self,
        panels: torch.Tensor,
        in_features: int,
        out_features: int,
        bias: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        # Plain attributes, not buffers: nobody may cast or move them, and they are in no state dict.
        self.panels, self.scales, self.padded_bias = panels, scales, bias

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, dtype: WeightDtype) -> PackedLinear:
        """Pack `weight` [N, K] and `bias` [N]."""
        outputs, inputs = weight.shape
        stored, scales = _stored(weight, dtype)
        return cls(kernels.pack(stored), inputs, outputs, _padded(bias), _padded(scales))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = kernels.linear(rows.contiguous(), self.panels, self.out_features, self.padded_bias, self.scales)
        return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] float32, made anew each time: for those who look, not for those who compute."""
        weight = kernels.unpack(self.panels, self.out_features).float()
        return weight if self.scales is None else weight * self.scales[: self.out_features, None]

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.padded_bias is None else self.padded_bias[: self.out_features]


class Together:
    """One product for several linears of one input: whichever is asked first computes for all."""

    def __init__(self, whole: PackedLinear) -> None:
        self.whole = whole
        self._x: torch.Tensor | None = None
        self._out = torch.empty(0)
        self._left = 0

    def part(self, x: torch.Tensor, begin: int, end: int, parts: int) -> torch.Tensor:
        if x is not self._x:
            self._x, self._out, self._left = x, self.whole(x), parts
        out = self._out[..., begin:end]
        self._left -= 1
        if self._left == 0:  # nothing is kept alive between two layers
            self._x, self._out = None, torch.empty(0)
        return out


class Part(nn.Module):
    """Outputs `begin … end` of linears that are computed together."""

    def __init__(self, together: Together, begin: int, end: int, parts: int) -> None:
        super().__init__()
        self.in_features, self.out_features = together.whole.in_features, end - begin
        self.together, self.begin, self._end, self._parts = together, begin, end, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.together.part(x, self.begin, self._end, self._parts)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] float32, made anew each time."""
        return self.together.whole.weight[self.begin : self._end]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.together.whole.bias
        return None if bias is None else bias[self.begin : self._end]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one pass over x, their panels side by side in memory."""

    def __init__(self, gate: PackedLinear, up: PackedLinear, down: nn.Module, act_fn: nn.Module, number: int) -> None:
        super().__init__()
        self._activation = number
        self._panels = torch.stack([gate.panels, up.panels], dim=1)
        self._scales = None
        if gate.scales is not None and up.scales is not None:
            self._scales = torch.stack([s.view(-1, PANEL) for s in (gate.scales, up.scales)], dim=1)
        gate.panels, up.panels = self._panels[:, 0], self._panels[:, 1]
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = gate, up, down, act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj._forward_hooks or self.up_proj._forward_hooks:  # an adapter adds to what each gives
            gate, up = self.gate_proj(x).contiguous(), self.up_proj(x).contiguous()
            return self._down(activate(gate, up, self._activation))
        hidden = self.hidden(x.reshape(-1, x.shape[-1]).contiguous())
        return self._down(hidden.view(*x.shape[:-1], -1))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """activation(gate(x)) * up(x); x [M, K] contiguous."""
        return kernels.gated(x, self._panels, self.gate_proj.out_features, self._activation, self._scales)

    def _down(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(hidden)
        return out


@torch.inference_mode()
def pack_linears(model: nn.Module, dtype: WeightDtype) -> int:
    """Replace a float32 model's linears; returns how many.

    Args:
        dtype: "auto" keeps weights in two bytes where they have no more bits than that, "bfloat16" rounds them to it,
            "int8" to 256 steps for each output.
    """
    count = 0
    for parent in list(model.modules()):
        for names in _TOGETHER:
            count += _merge(parent, names, dtype)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                weight = child.weight if isinstance(child, nn.Linear) else child.weight.T
                setattr(parent, name, PackedLinear.of(weight, child.bias, dtype))
                count += 1
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (fused := _fused(child)) is not None:
                setattr(parent, name, fused)
    return count


def _merge(parent: nn.Module, names: tuple[str, ...], dtype: WeightDtype) -> int:
    linears = [getattr(parent, name, None) for name in names]
    found = [linear for linear in linears if type(linear) is nn.Linear]
    if len(found) < len(names) or len({linear.in_features for linear in found}) > 1:
        return 0
    weight = torch.cat(tuple(linear.weight for linear in found))
    bias = None
    if any(linear.bias is not None for linear in found):
        biases = (weight.new_zeros(each.out_features) if each.bias is None else each.bias for each in found)
        bias = torch.cat(tuple(biases))
    together, begin = Together(PackedLinear.of(weight, bias, dtype)), 0
    for name, linear in zip(names, found, strict=True):
        setattr(parent, name, Part(together, begin, begin + linear.out_features, len(found)))
        begin += linear.out_features
    return len(found)


@torch.inference_mode()
def _activation(function: nn.Module) -> int | None:
    """The kernel's number of an activation, told by its values."""
    x = torch.linspace(-6, 6, 97)
    try:
        values = function(x)
    except (RuntimeError, TypeError, ValueError):
        return None
    for number, known in ((kernels.SILU, F.silu(x)), (kernels.GELU_TANH, F.gelu(x, approximate="tanh"))):
        if values.shape == known.shape and torch.allclose(values, known, rtol=1e-6, atol=1e-6):
            return number
    return None


def _fused(mlp: nn.Module) -> GatedMLP | None:
    """A gated MLP of packed linears as a `GatedMLP`, where that computes the same as `mlp`."""
    children = dict(mlp.named_children())
    if set(children) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    gate, up, down, act = (children[name] for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    if not (isinstance(gate, PackedLinear) and isinstance(up, PackedLinear)):
        return None
    alike = gate.panels.shape == up.panels.shape and gate.panels.dtype == up.panels.dtype
    number = _activation(act)
    if not alike or number is None or gate.padded_bias is not None or up.padded_bias is not None:
        return None
    x = torch.linspace(-1.7, 1.9, 3 * gate.in_features).view(1, 3, -1)
    wanted = mlp(x)
    singles = gate.panels, up.panels
    fused = GatedMLP(gate, up, down, act, number)
    if torch.allclose(fused(x), wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max())):
        return fused
    gate.panels, up.panels = singles
    return None


def _stored(weight: torch.Tensor, dtype: WeightDtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight as it is kept, and its scales where it has some."""
    if dtype == "int8":
        return kernels.quantize(weight)
    if dtype == "bfloat16":
        return weight.bfloat16(), None
    for narrow in (torch.bfloat16, torch.float16):
        if torch.equal(weight.to(narrow).float(), weight):
            return weight.to(narrow), None
    return weight, None


def _padded(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A vector for each output, filled up to whole panels; float32."""
    return None if vector is None else F.pad(vector.detach().float(), (0, -vector.shape[0] % PANEL)).contiguous()
