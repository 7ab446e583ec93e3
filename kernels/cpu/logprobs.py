"""What log-probabilities need of a row of logits on a CPU: its normaliser and its largest values, without a sort; one
thread a row.

    logits [V] ──► largest of each block ──► highest of the row ──► sum of exp(x - highest)
                     └─► the n-th largest of them: nothing below it is in the top n, and few blocks hold more
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from .exponential import exp_below
from .team import cpu_jit, floats_at, integers_at, kernel, take

_BLOCK = 256  # sums side by side, in an order that never changes
_LANES = 16
_INFINITY, _ZERO = np.float32(np.inf), np.float32(0)


def summarize(logits: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row's bits depend on nothing but the row. Log-probabilities are `logits - norms[:, :1] - norms[:, 1:]`.

    Args:
        logits: [R, V] float32, rows in one piece.
        most: how many of the largest values, at most V.

    Returns:
        norms: [R, 2] float32, the highest value and the log of the sum of exp(x - highest), which is NaN where the row
            has NaN or +inf, or nothing but -inf.
        values: [R, most] float32, the largest ones, falling; -inf where there are not as many others.
        places: [R, most] int64 of these, all different, of equals the first first.
    """
    assert logits.dtype == torch.float32, "log-probabilities are made of float32"
    assert logits.stride(-1) == 1, "rows are read in one piece"
    rows, size = logits.shape
    assert most <= size, "no row has more values than it has"
    norms, values = torch.empty(rows, 2), torch.empty(rows, most)
    places = torch.empty(rows, most, dtype=torch.int64)
    pointers = (tensor.data_ptr() for tensor in (logits, norms, values, places))
    _summarize(*pointers, rows, size, most, logits.stride(0))
    return norms, values, places


@intrinsic
def _largest_of_block(typing: Any, address: Any) -> Any:
    """The largest of `_BLOCK` float32; NaN does not count. In LLVM, which makes no vectors of a maximum by itself: it
    would have to know that the order makes no difference."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector, index = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(32)
        start = builder.inttoptr(arguments[0], vector.as_pointer())
        most = ir.Constant(vector, [float("-inf")] * _LANES)
        for i in range(_BLOCK // _LANES):
            x = builder.load(builder.gep(start, [index(i)]), align=4)
            most = builder.select(builder.fcmp_ordered(">", x, most), x, most)
        width = _LANES
        while width > 1:
            width //= 2
            halves = [ir.Constant(ir.VectorType(index, width), [*range(at, at + width)]) for at in (0, width)]
            low, high = (builder.shuffle_vector(most, most, half) for half in halves)
            most = builder.select(builder.fcmp_ordered(">", high, low), high, low)
        return builder.extract_element(most, index(0))

    return types.float32(types.int64), generate


@cpu_jit
def _largest(address, count):
    """Of a block of at most `_BLOCK`."""
    if count == _BLOCK:
        return _largest_of_block(address)
    logits, most = floats_at(address), -_INFINITY
    for i in range(count):
        most = logits[i] if logits[i] > most else most
    return most


@cpu_jit
def _log_of_sum(address, size, high, sums):
    """log of the sum of exp(x - high)."""
    for i in range(_BLOCK):
        sums[i] = _ZERO
    for start in range(0, size, _BLOCK):
        logits = floats_at(address + 4 * start)
        for i in range(min(_BLOCK, size - start)):
            sums[i] += exp_below(logits[i] - high)
    total = 0.0
    for i in range(_BLOCK):
        total += np.float64(sums[i])
    return np.log(total)


@cpu_jit
def _insert(x, place, values, places, most):
    """Put a value that is larger than the last of the top into its place, behind those that it equals."""
    at = most - 1
    while at > 0 and values[at - 1] < x:
        values[at], places[at] = values[at - 1], places[at - 1]
        at -= 1
    values[at], places[at] = x, place


@cpu_jit
def _top(logits, size, maxima, values, places, most):
    """Fill values and places, by way of the largest values of blocks."""
    last = most - 1
    for at in range(most):
        values[at] = -_INFINITY
    for block in range(len(maxima)):
        if maxima[block] > values[last]:
            _insert(maxima[block], block, values, places, most)
    least = values[last]
    for at in range(most):
        values[at] = -_INFINITY
    for block in range(len(maxima)):
        if maxima[block] < least or not maxima[block] > values[last]:
            continue
        for place in range(block * _BLOCK, min((block + 1) * _BLOCK, size)):
            if logits[place] >= least and logits[place] > values[last]:
                _insert(logits[place], place, values, places, most)
    at = most
    while at > 0 and values[at - 1] == -_INFINITY:
        at -= 1
    for place in range(size):  # the rest of the top is the first of what is -inf
        if at == most:
            break
        if not logits[place] > -_INFINITY:
            places[at] = place
            at += 1


@kernel
def _summarize(words):
    rows, size, most, stride = words[5], words[6], words[7], words[8]
    sums, maxima = np.empty(_BLOCK, dtype=np.float32), np.empty(-(-size // _BLOCK), dtype=np.float32)
    while True:
        row = take(words)
        if row >= rows:
            break
        logits, norms = words[1] + 4 * row * stride, floats_at(words[2] + 8 * row)
        for block in range(len(maxima)):
            start = block * _BLOCK
            maxima[block] = _largest(logits + 4 * start, min(_BLOCK, size - start))
        norms[0] = maxima.max()
        norms[1] = _log_of_sum(logits, size, norms[0], sums)
        if most > 0:
            values, places = floats_at(words[3] + 4 * row * most), integers_at(words[4] + 8 * row * most)
            _top(floats_at(logits), size, maxima, values, places, most)
