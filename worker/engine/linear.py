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
        self._together, self._begin, self._end, self._parts = together, begin, end, parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._together.part(x, self._begin, self._end, self._parts)

    @property
    def weight(self) -> torch.Tensor:
        """[N, K] float32, made anew each time."""
        return self._together.whole.weight[self._begin : self._end]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self._together.whole.bias
        return None if bias is None else bias[self._begin : self._end]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), gate and up in one pass over x."""

    def __init__(self, gate_up: torch.Tensor, mlp: nn.Module, activation: int, scales: torch.Tensor | None) -> None:
        super().__init__()
        gate, down = mlp.gate_proj, mlp.down_proj
        assert isinstance(gate, nn.Linear)
        assert isinstance(down, PackedLinear)
        self._gate_up, self._activation, self._scales = gate_up, activation, scales
        self._outputs = gate.out_features
        self.down_proj = down
        self.act_fn = mlp.act_fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        hidden = kernels.gated(rows, self._gate_up, self._outputs, self._activation, self._scales)
        out: torch.Tensor = self.down_proj(hidden)
        return out.view(*x.shape[:-1], out.shape[-1])


def pack_linears(model: nn.Module, dtype: WeightDtype, *, fuse_gates: bool = True) -> int:
    """Replace a float32 model's linears; returns how many.

    Args:
        dtype: "auto" keeps weights in two bytes where they have no more bits than that, "bfloat16" rounds them to it,
            "int8" to 256 steps for each output.
        fuse_gates: also gate and up of gated MLPs in one; not where each must stay a module of its own.
    """
    count = 0
    for parent in list(model.modules()):
        for names in _TOGETHER:
            count += _merge(parent, names, dtype)
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and not (fuse_gates and name in ("gate_proj", "up_proj") and _gated(parent)):
                setattr(parent, name, PackedLinear.of(child.weight, child.bias, dtype))
                count += 1
            elif type(child) is Conv1D:
                setattr(parent, name, PackedLinear.of(child.weight.T, child.bias, dtype))
                count += 1
    if fuse_gates:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if _gated(child):
                    setattr(parent, name, _fuse(child, dtype))
                    count += 2
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


def _gated(module: nn.Module) -> bool:
    """Whether a module is a gated MLP that `GatedMLP` computes: three linears, no biases before the product, an
    activation that the kernel has, and nothing else."""
    children = dict(module.named_children())
    if set(children) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    gate, up = children["gate_proj"], children["up_proj"]
    if not (type(gate) is nn.Linear and type(up) is nn.Linear and gate.bias is None and up.bias is None):
        return False
    return gate.weight.shape == up.weight.shape and _activation(children["act_fn"]) is not None


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


@torch.inference_mode()
def _fuse(mlp: nn.Module, dtype: WeightDtype) -> nn.Module:
    """A `GatedMLP` where it computes the same as `mlp`, else `mlp` with its linears packed singly."""
    gate, up, act = mlp.gate_proj, mlp.up_proj, mlp.act_fn
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(act, nn.Module)
    activation = _activation(act)
    assert activation is not None
    (stored_gate, gate_scales), (stored_up, up_scales) = _stored(gate.weight, dtype), _stored(up.weight, dtype)
    if stored_gate.dtype != stored_up.dtype:
        stored_gate, stored_up = gate.weight, up.weight
    panels = torch.stack([kernels.pack(stored_gate), kernels.pack(stored_up)], dim=1).contiguous()
    scales = None
    if gate_scales is not None and up_scales is not None:
        columns = [_padded(each) for each in (gate_scales, up_scales)]
        scales = torch.stack([c.view(-1, PANEL) for c in columns if c is not None], dim=1).contiguous()
    fused = GatedMLP(panels, mlp, activation, scales)
    x = torch.linspace(-1.7, 1.9, 3 * gate.in_features).view(3, -1)
    wanted, got = mlp(x), fused(x)
    close = float((got - wanted).norm()) <= (0.1 if dtype in ("int8", "bfloat16") else 1e-4) * float(wanted.norm())
    if close:
        return fused
    for name in ("gate_proj", "up_proj"):
        linear = getattr(mlp, name)
        setattr(mlp, name, PackedLinear.of(linear.weight, linear.bias, dtype))
    return mlp


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
