"""Attention on a CPU by compiled kernels: each row is the same bit for bit whatever else is in the step."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from ...kernels.cpu.attention import TILE, attend, store
from .attention import ScoreOptions
from .batch import AttentionBatch
from .kv_cache import Pool
from .panel_cache import PanelCache

Ints = npt.NDArray[np.int64]


MAX_ROWS = 64  # of a step whose plan keeps its place


class _Places:
    """Tensors that stay where they are from one decoding step to the next, so that a program finds them there."""

    def __init__(self, widest: int) -> None:
        self._widest = widest
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}
        self.shapes: set[tuple[int, int]] = set()  # of layers: heads of K/V, heads of queries

    def put(self, name: object, numbers: Ints) -> torch.Tensor:
        """A copy of numbers [n] or [n, m], in rows of the widest table's width where they are a table."""
        shape = (MAX_ROWS, self._widest) if name == "tables" else numbers.shape
        key = (name, *shape)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=torch.int64)
        held = self._tensors[key]
        held.numpy()[tuple(slice(size) for size in numbers.shape)] = numbers
        return held


class _Plan:
    """What the kernels must know of a step: where its tokens go, and its tiles for each shape of layer."""

    def __init__(self, batch: AttentionBatch, places: _Places | None = None) -> None:
        self.batch = batch
        self._places = places
        blocks, offsets = batch.places()
        self.blocks, self.places = self._tensor("blocks", blocks), self._tensor("places", offsets)
        self.tables = self._tensor("tables", batch.tables())
        self.longest = self._tensor("longest", batch.kv_lens().max(keepdims=True))
        self._tasks: dict[tuple[int, int], torch.Tensor] = {}
        for shape in places.shapes if places is not None else ():
            self.tasks(*shape)

    def _tensor(self, name: object, numbers: Ints) -> torch.Tensor:
        return torch.from_numpy(numbers) if self._places is None else self._places.put(name, numbers)

    def tasks(self, heads: int, query_heads: int) -> torch.Tensor:
        """[tasks, 7] int64, see `kernels.cpu.attention.attend`. The longest come first, so that none is left alone at
        the end."""
        key = (heads, query_heads)
        if key not in self._tasks:
            tasks = self._decoding(heads, query_heads)
            first = self.batch.num_decoding
            chunks = [
                _chunk(first + number, chunk.start, chunk.stop, chunk.num_cached, heads, query_heads)
                for number, chunk in enumerate(self.batch.chunks)
            ]
            if chunks:
                tasks = np.concatenate([tasks, *chunks])
                tasks = tasks[np.argsort(-tasks[:, 4], kind="stable")]
            self._tasks[key] = self._tensor(key, tasks)
            if self._places is not None:
                self._places.shapes.add(key)
        return self._tasks[key]

    def _decoding(self, heads: int, query_heads: int) -> Ints:
        """A tile for each sequence and K/V head: the query heads that share it. The longest first."""
        tiles = _decoding_tiles(heads, query_heads)
        newest = self.batch.kv_lens()[: self.batch.num_decoding] - 1
        order = np.argsort(-newest, kind="stable")
        tasks = np.tile(tiles, (len(order), 1, 1))
        tasks[:, :, 0] = tasks[:, :, 3] = order[:, None]
        tasks[:, :, 4] = newest[order][:, None]
        return tasks.reshape(-1, tiles.shape[1])


@functools.cache
def _decoding_tiles(heads: int, query_heads: int) -> Ints:
    """[tiles, 7] of one sequence, which stands in columns 0 and 3, and its newest position in column 4."""
    group = query_heads // heads
    head, start = (grid.ravel() for grid in np.meshgrid(np.arange(heads), np.arange(0, group, TILE), indexing="ij"))
    none = np.zeros_like(head)
    return np.stack([none, head, head * group + start, none, none, np.minimum(TILE, group - start), none], axis=1)


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
        self.invariant = True
        self._panels = pool
        self._plan: _Plan | None = None
        self._places = _Places(pool.num_blocks)

    @staticmethod
    def decodes(batch: AttentionBatch) -> bool:
        """Whether the plan of a step lies where that of the last one with as many rows lay: a program can run it."""
        return not batch.chunks and batch.num_decoding <= MAX_ROWS

    def plan(self, batch: AttentionBatch) -> _Plan:
        """Make ready for a step."""
        if self._plan is None or self._plan.batch is not batch:
            self._plan = _Plan(batch, self._places if self.decodes(batch) else None)
        return self._plan

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
        plan, panels = self.plan(batch), self._panels
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
