"""Attention on a CPU by compiled kernels: each row is the same bit for bit whatever else is in the step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.cpu.attention import TILE, attend, store
from .attention import ScoreOptions
from .batch import AttentionBatch
from .kv_cache import Pool
from .panel_cache import PanelCache

Ints = npt.NDArray[np.int64]


class _Plan:
    """What the kernels must know of a step: where its tokens go, and its tiles for each shape of layer."""

    def __init__(self, batch: AttentionBatch) -> None:
        self.batch = batch
        blocks, places = batch.places()
        self.blocks, self.places = torch.from_numpy(blocks), torch.from_numpy(places)
        self.tables = torch.from_numpy(batch.tables())
        self.longest = int(batch.kv_lens().max())
        self._tasks: dict[tuple[int, int], torch.Tensor] = {}

    def tasks(self, heads: int, query_heads: int) -> torch.Tensor:
        """[tasks, 7] int64, see `kernels.cpu.attention.attend`. The longest come first, so that none is left alone at
        the end."""
        key = (heads, query_heads)
        if key not in self._tasks:
            parts = [self._decoding(heads, query_heads // heads)]
            first = self.batch.num_decoding
            parts += [
                _chunk(first + number, chunk.start, chunk.stop, chunk.num_cached, heads, query_heads)
                for number, chunk in enumerate(self.batch.chunks)
            ]
            tasks = np.concatenate(parts)
            self._tasks[key] = torch.from_numpy(tasks[np.argsort(-tasks[:, 4], kind="stable")])
        return self._tasks[key]

    def _decoding(self, heads: int, group: int) -> Ints:
        """A tile for each sequence and K/V head: the query heads that share it."""
        first = np.arange(0, group, TILE)
        sequence, head, start = np.meshgrid(np.arange(self.batch.num_decoding), np.arange(heads), first, indexing="ij")
        newest = self.batch.kv_lens()[sequence] - 1
        columns = (
            sequence, head, head * group + start, sequence, newest, np.minimum(TILE, group - start), 0 * start
        )  # fmt: skip
        return np.stack([column.ravel() for column in columns], axis=1)


def _chunk(sequence: int, start: int, stop: int, position: int, heads: int, query_heads: int) -> Ints:
    """A tile for each query head and every few positions of a chunk."""
    offset, head = np.meshgrid(np.arange(0, stop - start, TILE), np.arange(query_heads), indexing="ij")
    columns = (
        np.full_like(offset, sequence), head * heads // query_heads, head, start + offset, position + offset,
        np.minimum(TILE, stop - start - offset), np.ones_like(offset),
    )  # fmt: skip
    return np.stack([column.ravel() for column in columns], axis=1)


class CpuAttention:
    """The kernels over a pool of panels. Answers to `attention.AttentionBackend`."""

    def __init__(self, pool: PanelCache) -> None:
        self.pool: Pool = pool
        self._panels = pool
        self._plan: _Plan | None = None

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
        if self._plan is None or self._plan.batch is not batch:
            self._plan = _Plan(batch)
        plan, panels = self._plan, self._panels
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        keys, values = panels.keys[layer], panels.values[layer]
        store(keys, values, k, v, plan.blocks, plan.places)
        return attend(
            q,
            keys,
            values,
            plan.tables,
            plan.tasks(k.shape[0], q.shape[0]),
            heads=k.shape[0],
            value_dim=v.shape[-1],
            longest=plan.longest,
            scale=options.scale,
            window=window or 0,
            softcap=options.softcap or 0.0,
            sinks=None if options.sinks is None else options.sinks.float(),
        )
