"""A decoder layer as a few launches of the CPU kernels, in the place of some hundred small operations.

    x ─ norm ─ q/k/v ─ (norms) rotary ─ attention ─ o ─(norm)─ + ─ norm ─ gate/up ─ down ─(norm)─ +
    └──────────────────────────────────────────────────────────┘└────────────────────────────────┘

At one sequence a step is otherwise half overhead. Which layers are tried is told by `known_layers`; where one computes
something else, or an adapter hooks into a linear, the layer's own forward runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...kernels.cpu.linear import linear
from ...kernels.cpu.norm import rms_norm
from ...kernels.cpu.panels import PANEL
from ...kernels.cpu.rotary import rotate
from .attention import PagedAttention
from .fuse import CpuRMSNorm
from .known_layers import HEAD_NORMS
from .linear import GatedMLP, PackedLinear, Part

Angles = tuple[torch.Tensor, torch.Tensor]


def fused(layer: Any, attention: PagedAttention) -> FusedLayer | None:
    """The forward of a layer of the known shape in a model that has run once with `attention`; None where it is not
    what the kernels take."""
    children, parts = dict(layer.named_children()), dict(layer.self_attn.named_children())
    norms = [child for name, child in (*children.items(), *parts.items()) if name.endswith("norm")]
    known = isinstance(layer.mlp, GatedMLP) and isinstance(layer.mlp.down_proj, PackedLinear)
    known = known and isinstance(parts["q_proj"], Part) and isinstance(parts["o_proj"], PackedLinear)
    index, size = getattr(layer.self_attn, "layer_idx", None), getattr(layer.self_attn, "head_dim", None)
    if not known or not all(isinstance(norm, CpuRMSNorm) for norm in norms):
        return None
    if index not in attention.options or not isinstance(size, int) or _sizes(layer, size) is None:
        return None
    return FusedLayer(layer, attention, size)


def _sizes(layer: Any, size: int) -> tuple[int, int] | None:
    """Heads of queries and of keys, where the fused layer can cut its linears' outputs into them."""
    attn = layer.self_attn
    widths = [getattr(attn, name).out_features for name in ("q_proj", "k_proj", "v_proj")]
    whole = all(width % size == 0 for width in widths) and widths[1] == widths[2]
    norms = [getattr(attn, name) for name in HEAD_NORMS if hasattr(attn, name)]
    if not whole or any(norm.weight.shape != (size,) for norm in norms) or len({norm.eps for norm in norms}) > 1:
        return None
    if any(module.out_features % 16 for module in (attn.o_proj, layer.mlp.down_proj)):
        return None
    return widths[0] // size, widths[1] // size


class FusedLayer:
    """The forward of one layer."""

    def __init__(self, layer: Any, attention: PagedAttention, head_dim: int) -> None:
        attn = layer.self_attn
        self._layer, self._attention, self._index = layer, attention, attn.layer_idx
        self._head_dim = head_dim
        sizes = _sizes(layer, head_dim)
        assert sizes is not None
        self._heads, self._kv_heads = sizes
        self._qkv: PackedLinear = attn.q_proj.together.whole
        self._o: PackedLinear = attn.o_proj
        self._mlp: GatedMLP = layer.mlp
        self._down: PackedLinear = layer.mlp.down_proj
        self._head_norms = (
            (attn.q_norm.weight, attn.k_norm.weight, attn.q_norm.eps) if hasattr(attn, "q_norm") else None
        )
        self._norm_1: nn.RMSNorm = layer.input_layernorm
        outer = hasattr(layer, "post_feedforward_layernorm")
        self._norm_2: nn.RMSNorm = layer.pre_feedforward_layernorm if outer else layer.post_attention_layernorm
        self._after_attention: nn.RMSNorm | None = layer.post_attention_layernorm if outer else None
        self._after_mlp: nn.RMSNorm | None = layer.post_feedforward_layernorm if outer else None
        self._hooks = [module._forward_hooks for module in layer.modules()]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, T, width] float32 → the same."""
        embeddings = self.angles(args, kwargs)
        if embeddings is None:
            return type(self._layer).forward(self._layer, hidden_states, *args, **kwargs)
        return self.compute(hidden_states[0].contiguous(), embeddings)[None]

    def angles(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Angles | None:
        """The cosines and sines [1, T, head_dim] of a call, or None where the layer's own forward must take it."""
        embeddings: Angles | None = kwargs.get("position_embeddings")
        if embeddings is None or embeddings[0].shape[-1] != self._head_dim or args or any(self._hooks):
            return None
        return embeddings

    def compute(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """x [T, width] float32, contiguous → the same."""
        x = self._join(self._attend(_normed(x, self._norm_1), angles), self._o, x, self._after_attention)
        return self._join(self._mlp.hidden(_normed(x, self._norm_2)), self._down, x, self._after_mlp)

    @property
    def whole(self) -> bool:
        """Whether no output of its products is cut to size, which would take a copy between two launches."""
        products = self._qkv.out_features, self._mlp.gate_proj.out_features
        return not any(width % PANEL for width in products)

    def _attend(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        qkv, size = _product(x, self._qkv), self._head_dim
        by_head = qkv.view(qkv.shape[0], -1, size).transpose(0, 1)
        heads, stop = self._heads, self._heads + self._kv_heads
        cos, sin = angles
        q, k = rotate(by_head[:heads], by_head[heads:stop], cos[0], sin[0], self._head_norms)
        options, window = self._attention.options[self._index]
        out = self._attention.run(self._index, q, k, by_head[stop:], options, window)
        return out.view(out.shape[0], -1)

    @staticmethod
    def _join(x: torch.Tensor, last: PackedLinear, residual: torch.Tensor, norm: nn.RMSNorm | None) -> torch.Tensor:
        """residual + last(x), or residual + norm(last(x))."""
        if norm is None:
            return _product(x, last, residual)
        return _normed(_product(x, last), norm, residual)


def _product(x: torch.Tensor, module: PackedLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
    return linear(x, module.panels, module.out_features, module.padded_bias, module.scales, residual)


def _normed(x: torch.Tensor, norm: nn.RMSNorm, residual: torch.Tensor | None = None) -> torch.Tensor:
    assert norm.eps is not None
    return rms_norm(x, norm.weight, norm.eps, residual)
