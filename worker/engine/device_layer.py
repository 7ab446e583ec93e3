"""A decoder layer on a GPU with its smallest operations joined: half the launches of its own forward.

    x ─ norm ─ q/k/v ─ (norms) rotary, K/V to the pool ─ attention ─ o ─(norm)─ + norm ─ gate/up ─ down ─(norm)─ +
                       └───────── one launch ────────┘                          └ one ┘

Which layers are tried is told by `known_layers`. Linears stay modules, so adapters hook into them as ever.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ...kernels.heads import HeadNorm
from ...kernels.rms_norm import add_rms_norm
from ...kernels.rope import norm_rope_store
from .attention import PagedAttention
from .attention_triton import TritonAttention
from .fuse_cuda import DeviceRMSNorm, Rotary
from .known_layers import HEAD_NORMS
from .rebind import ROTARY


def fused(layer: Any, attention: PagedAttention) -> DeviceLayer | None:
    """The forward of a layer of the known shape in a model that has run once with `attention`; None where it is not
    what the kernels take."""
    attn: Any = layer.self_attn
    index, size = getattr(attn, "layer_idx", None), getattr(attn, "head_dim", None)
    rotary = inspect.unwrap(attn.forward).__globals__.get(ROTARY)
    if index not in attention.options or not isinstance(size, int) or not isinstance(rotary, Rotary):
        return None
    linears = [getattr(attn, name) for name in ("q_proj", "k_proj", "v_proj")]
    if not all(isinstance(linear, nn.Linear) and linear.out_features % size == 0 for linear in linears):
        return None
    norms = [(name, m) for parent in (layer, attn) for name, m in parent.named_children() if name.endswith("norm")]
    if not all(isinstance(norm, DeviceRMSNorm) for _, norm in norms):
        return None
    if any(name in HEAD_NORMS and norm.weight.shape != (size,) for name, norm in norms):
        return None
    return DeviceLayer(layer, attention, rotary.interleaved)


class DeviceLayer:
    """The forward of one layer."""

    def __init__(self, layer: Any, attention: PagedAttention, interleaved: bool) -> None:
        attn = layer.self_attn
        self._interleaved = interleaved
        self._layer, self._attn, self._attention, self._index = layer, attn, attention, attn.layer_idx
        self._head_dim: int = attn.head_dim
        self._q_norm, self._k_norm = (_head_norm(getattr(attn, name, None)) for name in ("q_norm", "k_norm"))
        outer = hasattr(layer, "post_feedforward_layernorm")
        self._norm_2: DeviceRMSNorm = layer.pre_feedforward_layernorm if outer else layer.post_attention_layernorm
        self._after_attention = layer.post_attention_layernorm if outer else nn.Identity()
        self._after_mlp = layer.post_feedforward_layernorm if outer else nn.Identity()

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states [1, T, width] → the same."""
        angles, backend = kwargs.get("position_embeddings"), self._attention.backend
        size = (1, hidden_states.shape[1], self._head_dim)
        if args or angles is None or angles[0].shape != size or not isinstance(backend, TritonAttention):
            return type(self._layer).forward(self._layer, hidden_states, *args, **kwargs)
        x = self._attend(self._layer.input_layernorm(hidden_states), angles, backend)
        norm = self._norm_2
        assert norm.eps is not None
        x, residual = add_rms_norm(
            self._after_attention(x), hidden_states, norm.weight, norm.eps, unit_offset=norm.unit_offset
        )
        return residual + self._after_mlp(self._layer.mlp(x))

    def _attend(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], backend: TritonAttention) -> Any:
        attn, batch = self._attn, self._attention.batch
        assert batch is not None
        q, k, v = (linear(x).view(x.shape[1], -1, self._head_dim) for linear in (attn.q_proj, attn.k_proj, attn.v_proj))
        keys, values = backend.pools(self._index)
        slots = backend.slots(batch)
        cos, sin = angles
        q = norm_rope_store(
            q, k, v, cos[0], sin[0], keys, values, slots,
            interleaved=self._interleaved, q_norm=self._q_norm, k_norm=self._k_norm,
        )  # fmt: skip
        options, window = self._attention.options[self._index]
        return attn.o_proj(backend.attend(batch, self._index, q, options, window).view(1, x.shape[1], -1))


def _head_norm(norm: DeviceRMSNorm | None) -> HeadNorm | None:
    if norm is None or norm.eps is None:
        return None
    return HeadNorm(norm.weight, norm.eps, norm.unit_offset)
