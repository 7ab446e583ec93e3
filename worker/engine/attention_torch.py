"""Attention in torch's own operations, on any device: K/V are gathered from the pool for each layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention import ScoreOptions, attend_causal
from .batch import AttentionBatch, Chunk
from .kv_cache import KVCache, Pool


class TorchAttention:
    """Answers to `attention.AttentionBackend`."""

    def __init__(self, cache: KVCache) -> None:
        self.pool: Pool = cache
        self.invariant = False
        self._cache = cache

    def run(
        self,
        batch: AttentionBatch,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: ScoreOptions,
        window: int | None,
    ) -> torch.Tensor:
        heads = k.shape[0]
        self._cache.store(layer, batch.store_index(heads), k, v)
        parts = []
        if batch.num_decoding:
            parts.append(self._decode(batch, layer, q[:, : batch.num_decoding], heads, options, window))
        for number, chunk in enumerate(batch.chunks):
            rows = slice(chunk.start, chunk.stop)
            if chunk.num_cached == 0 and options.plain and (window is None or chunk.kv_len <= window):
                parts.append(attend_causal(q[:, rows], k[:, rows], v[:, rows], options.scale))
            else:
                parts.append(self._extend(batch, layer, number, chunk, q[:, rows], heads, options, window))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self,
        batch: AttentionBatch,
        layer: int,
        q: torch.Tensor,
        heads: int,
        options: ScoreOptions,
        window: int | None,
    ) -> torch.Tensor:
        """One query per sequence, all sequences at once: the query heads of one KV head become its rows."""
        view = batch.decode_view(heads, window)
        count = q.shape[1]
        keys, values = self._cache.gather(layer, view.index, count)
        rows = q.transpose(0, 1).reshape(count, heads, -1, q.shape[-1])
        out = attend(rows, keys, values, view.bias, options)
        return out.reshape(count, -1, values.shape[-1])

    def _extend(
        self,
        batch: AttentionBatch,
        layer: int,
        number: int,
        chunk: Chunk,
        q: torch.Tensor,
        heads: int,
        options: ScoreOptions,
        window: int | None,
    ) -> torch.Tensor:
        """Many queries of one sequence over what it has cached and over themselves."""
        view = batch.chunk_view(number, heads, window)
        keys, values = self._cache.gather(layer, view.index, 1)
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
