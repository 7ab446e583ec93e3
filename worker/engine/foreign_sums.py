"""Finds what of a model sums by torch's own operations, whose order may follow the number of rows.

Libraries choose among kernels by shape, so a row of their product may differ in its last bits in another batch; that
two batches agreed says little of a third. Where a forward has no such operation, rows are independent by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# By operation, the argument whose last dimension is summed over. One of length 1 is no sum: rotary angles are such.
_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
_OTHERS = {
    *("einsum", "dot", "inner", "tensordot", "bilinear", "_scaled_mm", "grouped_mm", "_grouped_mm"),
    *("conv1d", "conv2d", "conv3d", "convolution", "scaled_dot_product_attention"),
}
# On a GPU the threads that share a row are as many as other rows leave.
_REDUCTIONS = {"sum", "mean", "var", "std", "norm", "linalg_vector_norm", "logsumexp", "cumsum"}


class ForeignSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, notes such operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        product = name in _PRODUCTS and args[_PRODUCTS[name]].shape[-1] > 1
        on_gpu = first is not None and first.device.type == "cuda" and first.is_floating_point()
        if product or name in _OTHERS or (on_gpu and name in _REDUCTIONS):
            self.found.add(name)
        return func(*args, **(kwargs or {}))
