"""Plain sampling without a look at the host: who asks for no more, and what the kernel in a CUDA graph is given.

What needs a request's own tokens, a grammar, or log-probabilities goes through `sampler`, which calls the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt

from ...shared.messages import GenerateJob
from .adjust import may_need_adjusting
from .grammar import Grammar
from .noise import row_keys_array
from .sequence import Sequence


def is_plain(job: GenerateJob) -> bool:
    """Whether a draw from the logits as they are is all that a job asks for."""
    return not (job.return_logprob or Grammar.of(job.sampling) is not None or may_need_adjusting(job.sampling))


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
