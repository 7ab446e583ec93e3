"""Plain sampling within a CUDA graph: what the kernel is given, and what becomes of its tokens.

What needs a request's own tokens, a grammar, or log-probabilities goes through `sampler`, which calls the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .adjust import may_need_adjusting
from .noise import row_keys_array
from .sampler import Sample
from .sequence import Row


def is_plain(row: Row) -> bool:
    """Whether a draw from the logits as they are is all that a row asks for."""
    return not (row.job.return_logprob or row.sequence.matcher is not None or may_need_adjusting(row.params))


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """`floats` [3, R] float32: temperature, top-p, min-p; `top_ks` [R] int32; `keys` [R, 2] int32. On the host."""

    floats: npt.NDArray[np.float32]
    top_ks: npt.NDArray[np.int32]
    keys: npt.NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows[Row], count: int) -> SamplingArrays:
        """Those of `rows`, and greedy ones up to `count`."""
        out = cls.greedy(count)
        params = [row.params for row in rows]
        drawn = [number for number, s in enumerate(params) if not s.greedy]
        if not drawn:
            return out
        out.floats[:, drawn] = [
            [params[number].temperature for number in drawn],
            [params[number].top_p for number in drawn],
            [params[number].min_p for number in drawn],
        ]
        out.top_ks[drawn] = [min(max(params[number].top_k, 0), 2**31 - 1) for number in drawn]
        seeds, positions = zip(*((rows[n].sequence.seed, rows[n].num_output_tokens) for n in drawn), strict=True)
        out.keys[drawn] = row_keys_array(seeds, positions)
        return out

    @classmethod
    def greedy(cls, count: int) -> SamplingArrays:
        floats = np.zeros((3, count), dtype=np.float32)
        floats[1] = 1.0
        return cls(floats, np.zeros(count, dtype=np.int32), np.zeros((count, 2), dtype=np.int32))


def samples(tokens: torch.Tensor) -> list[Sample]:
    """Bring drawn tokens [S] to the host: the step's one wait for the device."""
    return [Sample(token if token >= 0 else None) for token in tokens.tolist()]
