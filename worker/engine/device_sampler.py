"""Plain sampling within a CUDA graph: what the kernel is given, and what becomes of its tokens.

What needs a request's own tokens, a grammar, or log-probabilities goes through `sampler`, which calls the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from .adjust import may_need_adjusting
from .noise import row_keys_array
from .sampler import Sample
from .sequence import Row, Sequence


def is_plain(row: Row) -> bool:
    """Whether a draw from the logits as they are is all that a row asks for."""
    return not (row.job.return_logprob or row.sequence.matcher is not None or may_need_adjusting(row.params))


class SamplingColumns:
    """Sampling parameters of rows, and of greedy ones up to `count`, on the host.

    Attributes:
        floats: [3, count] float32: temperature (0: greedy), top-p, min-p.
        top_ks: [count] int32; 0 for no limit.
    """

    def __init__(self, sequences: Rows[Sequence], count: int) -> None:
        self.floats = np.zeros((3, count), dtype=np.float32)
        self.floats[1] = 1.0
        self.top_ks = np.zeros(count, dtype=np.int32)
        self._count = count
        self._drawn = [(row, sequence) for row, sequence in enumerate(sequences) if not sequence.params.greedy]
        self._rows = [row for row, _ in self._drawn]
        self._seeds = [sequence.seed for _, sequence in self._drawn]
        for row, sequence in self._drawn:
            s = sequence.params
            self.floats[:, row] = s.temperature, s.top_p, s.min_p
            self.top_ks[row] = min(max(s.top_k, 0), 2**31 - 1)

    def keys(self) -> npt.NDArray[np.int32]:
        """[count, 2] of the noise at the sequences' present positions; zeros in greedy rows."""
        keys = np.zeros((self._count, 2), dtype=np.int32)
        if self._drawn:
            keys[self._rows] = row_keys_array(self._seeds, [sequence.num_output_tokens for _, sequence in self._drawn])
        return keys


def samples(tokens: torch.Tensor) -> list[Sample]:
    """Bring drawn tokens [S] to the host: the step's one wait for the device."""
    return [Sample(token if token >= 0 else None) for token in tokens.tolist()]
