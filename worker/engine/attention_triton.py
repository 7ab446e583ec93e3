"""Attention by Triton kernels straight on the paged pool: nothing is gathered, nothing padded.

On a GPU; and on a CPU in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from ...shared.errors import ConfigError
from .attention import ScoreOptions
from .batch import AttentionBatch
from .kv_cache import KVCache, Pool
from .step_tensors import FixedBatch, StepTensors

# Programs that keep a GPU busy, per multiprocessor; more splits of a sequence's keys only cost their merge.
_PROGRAMS_PER_PROCESSOR = 4
_MOST_SPLITS = 64
_SPLIT_SIZE = 256  # keys, at least


class TritonAttention:
    """Answers to `attention.AttentionBackend`.

    Args:
        cache: the pool.
        context_length: tokens of the longest sequence.
        invariant: sum each row in one order whatever else is in the step, and whether it decodes or prefills.

    Raises:
        ConfigError: triton is not installed.
    """

    def __init__(self, cache: KVCache, *, context_length: int, invariant: bool = False) -> None:
        if not triton_is_installed():
            raise ConfigError(
                "--attention-backend (HEADRACE_ATTENTION_BACKEND) triton: triton is not installed; "
                "install it (Linux only), or use --attention-backend torch"
            )
        self.pool: Pool = cache
        self._cache = cache
        self._context_length = context_length
        self.invariant = invariant
        self._batch: AttentionBatch | None = None
        self._tensors: StepTensors | None = None

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
        from ...kernels.store_kv import store_kv

        store_kv(k.transpose(0, 1), v.transpose(0, 1), *self.pools(layer), self.slots(batch))
        return self.attend(batch, layer, q.transpose(0, 1), options, window)

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_blocks, Hk, block_size, D] and values of a layer."""
        return self._cache.pools(layer)

    def slots(self, batch: AttentionBatch) -> torch.Tensor:
        """[T] int64, where each row's K/V go."""
        return self._tensors_of(batch).slot_mapping

    def attend(
        self, batch: AttentionBatch, layer: int, q: torch.Tensor, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        """As `run`, for a flat batch whose K/V are in the pool already. q [T, H, D]; returns [T, H, Dv]."""
        tensors = self._tensors_of(batch)
        rows = q.to(self._cache.dtype)
        decoding, parts = tensors.num_decoding, []
        if decoding:
            parts.append(self._decode(tensors, layer, rows[:decoding], options, window))
        if decoding < len(rows):
            parts.append(self._extend(tensors, layer, rows[decoding:], options, window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(
        self, tensors: StepTensors, layer: int, q: torch.Tensor, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        from ...kernels.decode_attention import decode_attention
        from ...kernels.extend_attention import extend_attention

        count, (keys, values) = len(q), self._cache.pools(layer)
        tables, lens = tensors.block_tables[:count], tensors.kv_lens[:count]
        shaped = {"window": window, "softcap": options.softcap, "sinks": options.sinks}
        if self.invariant:  # as prefill does it
            bounds = _counting(count, q.device)
            return extend_attention(q, keys, values, tables, lens, bounds, scale=options.scale, **shaped)  # type: ignore[arg-type]
        splits = num_splits(count * keys.shape[1], self._context_length, _processors(q.device))
        return decode_attention(
            q,
            keys,
            values,
            tables,
            lens,
            scale=options.scale,
            num_splits=splits,
            split_size=_SPLIT_SIZE,
            **shaped,  # type: ignore[arg-type]
        )

    def _extend(
        self, tensors: StepTensors, layer: int, q: torch.Tensor, options: ScoreOptions, window: int | None
    ) -> torch.Tensor:
        from ...kernels.extend_attention import extend_attention

        keys, values = self._cache.pools(layer)
        first = tensors.num_decoding
        return extend_attention(
            q,
            keys,
            values,
            tensors.block_tables[first:],
            tensors.kv_lens[first:],
            tensors.cu_seqlens_q,
            scale=options.scale,
            window=window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def _tensors_of(self, batch: AttentionBatch) -> StepTensors:
        if isinstance(batch, FixedBatch):
            return batch.tensors
        if batch is not self._batch or self._tensors is None:
            self._batch = batch
            self._tensors = StepTensors.of(batch, self._cache.block_size, self._cache.device)
        return self._tensors


def num_splits(tiles: int, context_length: int, processors: int) -> int:
    """Into how many parts decoding cuts the keys of each sequence, where there are `tiles` sequences times KV heads.

    Enough to keep the processors busy, at least 4 for the sake of one long sequence among short ones, and no more than
    the longest context fills. It follows from nothing that changes within a CUDA graph.
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // max(tiles, 1))
    return max(1, min(max(wanted, 4), _MOST_SPLITS, -(-context_length // _SPLIT_SIZE)))


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.lru_cache(maxsize=512)
def _counting(count: int, device: torch.device) -> torch.Tensor:
    """0, 1, …, count: the bounds of segments of one row."""
    return torch.arange(count + 1, dtype=torch.int32, device=device)
