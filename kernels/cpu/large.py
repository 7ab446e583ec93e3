"""Memory for outputs of tens of megabytes: logits of a large vocabulary, above all.

malloc gives a block of more than 32 MB back to the system at once, and the next one comes as fresh pages, each of them
a fault when it is first written to: a third of the time of such a product.
"""

from __future__ import annotations

import math
import sys
import threading

import numpy as np
import torch

LARGE = 1 << 20  # float32: 4 MB; what is smaller malloc keeps by itself


class Kept:
    """One block, lent again as soon as no tensor over it is left; while it is out, others come from torch."""

    def __init__(self) -> None:
        self._block = np.empty(0, dtype=np.float32)
        self._free = sys.getrefcount(self._block)
        self._lock = threading.Lock()

    def empty(self, *shape: int) -> torch.Tensor:
        """float32, not initialised."""
        size = math.prod(shape)
        with self._lock:
            if sys.getrefcount(self._block) != self._free:  # a tensor's memory refers to the array that it came from
                return torch.empty(shape, dtype=torch.float32)
            if self._block.size < size:
                self._block = np.empty(size, dtype=np.float32)
            return torch.from_numpy(self._block)[:size].view(shape)
