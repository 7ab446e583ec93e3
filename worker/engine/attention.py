"""Our attention function, which transformers' models call instead of theirs: K/V go to the paged pool.

transformers finds it by name in ALL_ATTENTION_FUNCTIONS. No mask function is registered under that name, so models
build no mask, and they get no cache object: the flat batch's own metadata says who sees what. A model's modules find
their `PagedAttention` on themselves, so that two models in one process do not meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .batch import AttentionBatch, Chunk
from .kv_cache import KVCache

IMPLEMENTATION = "headrace_paged"
_ATTRIBUTE = "headrace_attention"


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """What a layer does to its scores: `scale` before, `softcap` by tanh, `sinks` [H] as one more column."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class PagedAttention:
    """What the layers of one model share: the pool, and the batch that is being computed."""

    def __init__(self) -> None:
        self.cache: KVCache | None = None
        self.batch: AttentionBatch | None = None

    def attach(self, model: nn.Module) -> None:
        """Let all attention modules of a model find this object."""
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _ATTRIBUTE, self)

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        """Store K/V of the flat batch and attend. q [H, T, D], k and v [Hk, T, D]; returns [T, H, Dv]."""
        assert self.cache is not None
        assert self.batch is not None
        batch, heads = self.batch, k.shape[0]
        self.cache.store(layer, batch.store_index(heads), k, v)
        parts = []
        if batch.num_decoding:
            parts.append(self._decode(layer, q[:, : batch.num_decoding], heads, options, window))
        for number, chunk in enumerate(batch.chunks):
            rows = slice(chunk.start, chunk.stop)
            if chunk.num_cached == 0 and options.plain and (window is None or chunk.kv_len <= window):
                parts.append(attend_causal(q[:, rows], k[:, rows], v[:, rows], options.scale))
            else:
                parts.append(self._extend(layer, number, chunk, q[:, rows], heads, options, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, layer: int, q: torch.Tensor, heads: int, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        """One query per sequence, all sequences at once: the query heads of one KV head become its rows."""
        assert self.cache is not None
        assert self.batch is not None
        view = self.batch.decode_view(heads, window)
        count = q.shape[1]
        keys, values = self.cache.gather(layer, view.index, count)
        rows = q.transpose(0, 1).reshape(count, heads, -1, q.shape[-1])
        out = attend(rows, keys, values, view.bias, options)
        return out.reshape(count, -1, values.shape[-1])

    def _extend(
        self,
        layer: int,
        number: int,
        chunk: Chunk,
        q: torch.Tensor,
        heads: int,
        options: ScoreOptions,
        window: int | None,
    ) -> torch.Tensor:
        """Many queries of one sequence over what it has cached and over themselves."""
        assert self.cache is not None
        assert self.batch is not None
        view = self.batch.chunk_view(number, heads, window)
        keys, values = self.cache.gather(layer, view.index, 1)
        length, group = chunk.stop - chunk.start, q.shape[0] // heads
        rows = q.reshape(1, heads, group * length, q.shape[-1])
        out = attend(rows, keys, values, view.bias.repeat(group, 1), options)
        return out.reshape(q.shape[0], length, -1).transpose(0, 1)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, options: ScoreOptions
) -> torch.Tensor:
    """Attention with the query heads of a KV head as rows, so that K/V are never repeated.

    Args:
        q: [B, Hk, R, D]; R = (heads per KV head) * queries, heads first.
        keys, values: [B, Hk, L, D].
        bias: broadcastable to [B, Hk, R, L]; 0 or -inf.

    Returns:
        [B, Hk, R, Dv].
    """
    if options.plain:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=options.scale)
    scores = (q @ keys.transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores + bias
    if options.sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        heads, rows = q.shape[1], q.shape[2]
        sinks = options.sinks.view(heads, -1).repeat_interleave(rows * heads // options.sinks.numel(), dim=1)
        sinks = sinks.to(scores.dtype)[None, :, :, None].expand(q.shape[0], -1, -1, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values


def attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """A whole prompt over itself. q [H, T, D], k and v [Hk, T, D]; returns [T, H, Dv]."""
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The signature transformers calls: query [1, H, T, D], key and value [1, Hk, T, D] → [1, T, H, Dv]."""
    paged: PagedAttention = getattr(module, _ATTRIBUTE)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    q, k, v = query[0], key[0], value[0]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    return paged.run(layer, q, k, v, ScoreOptions(scale, softcap, s_aux), sliding_window)[None], None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention_function)
