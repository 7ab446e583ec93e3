"""Draws the next tokens on a CPU: temperature, top-k, top-p, min-p, Gumbel noise, argmax; one thread a row, no sort.

Of all noise only what can win is made: a token's noise is below a bound that the high bits of its hash give, and only
where score and bound together beat the best so far is a logarithm taken. top-p is drawn by rejection: the winner among
all tokens is the answer if those likelier than it weigh less than top-p; else it goes, with all that are no likelier,
and the same noise chooses among the rest. What stays in the end is the winner among the tokens that top-p keeps.
"""

from __future__ import annotations

import numpy as np
import torch

from .exponential import exp
from .team import cpu_jit, floats_at, integers_at, kernel, take

_LANES = 16  # sums and maxima side by side, in an order that never changes
_BLOCK = 1024  # tokens hashed at a time
_BOUNDS = 256  # steps of the bound on the noise, by the high bits of the hash
_NONE = -1

_INFINITY = np.float32(np.inf)
_ONE, _ZERO, _HALF = np.float32(1), np.float32(0), np.float32(0.5)
# 23 bits: with 24 the largest would round to 1, whose noise is infinite.
_UNIT = np.float32(2.0**-23)
_FACTORS = np.array([0x9E3779B1, 0x7FEB352D, 0x846CA68B], dtype=np.uint32)
_SHIFTS = np.array([16, 15, 9], dtype=np.uint32)


def _bounds() -> torch.Tensor:
    """[256] float32: more than the noise of any hash whose high 8 bits are the index."""
    upper = (np.arange(1, _BOUNDS + 1, dtype=np.float64) * 2.0**15 - 0.5) * 2.0**-23
    return torch.from_numpy((-np.log(-np.log(upper)) + 1e-3).astype(np.float32))


_BOUND_TABLE = _bounds()


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row.

    Args:
        logits: [R, V] float32, -inf for tokens that may not come; contiguous.
        temperatures: [R] float32; 0 takes the likeliest token, the first of equals.
        top_ks: [R] int32; 0 for no limit. Values that equal the k-th are kept, too.
        top_ps: [R] float32, a share of what top-k keeps: a token stays while those likelier than it have less.
        min_ps: [R] float32, a share of the likeliest token's probability.
        keys: [R, 2] int32, of the noise: `row_keys` of the worker.

    Returns:
        [R] int64; -1 where the row has NaN or +inf, or nothing but -inf.
    """
    assert logits.dtype == torch.float32, "the sampler's logits are float32"
    assert logits.is_contiguous(), "rows stand side by side"
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    floats = torch.stack([temperatures, top_ps, min_ps], dim=1)
    integers = torch.cat([top_ks[:, None].long(), keys.long() & 0xFFFFFFFF], dim=1)
    pointers = (tensor.data_ptr() for tensor in (logits, floats, integers, _BOUND_TABLE, tokens))
    _sample(*pointers, rows, size)
    return tokens


@cpu_jit
def _highest(logits, size):
    """The largest value; NaN where one is NaN or +inf."""
    lanes, bad = np.full(_LANES, -_INFINITY, dtype=np.float32), np.zeros(_LANES, dtype=np.int32)
    whole = size // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            x = logits[start + lane]
            lanes[lane] = x if x > lanes[lane] else lanes[lane]
            bad[lane] |= np.int32(not x < _INFINITY)
    for lane in range(size - whole):
        x = logits[whole + lane]
        lanes[lane] = x if x > lanes[lane] else lanes[lane]
        bad[lane] |= np.int32(not x < _INFINITY)
    if bad.max() > 0:
        return np.float32(np.nan)
    return lanes.max()


@cpu_jit
def _likelier(logits, size, least, value, high, temperature, block):
    """How much of the mass of values >= least stands above `value`, from 0 to 1."""
    whole, above = np.zeros(_LANES, dtype=np.float32), np.zeros(_LANES, dtype=np.float32)
    for start in range(0, size, _BLOCK):
        count = min(_BLOCK, size - start)
        for i in range(count):
            block[i] = exp((logits[start + i] - high) / temperature)
        for i in range(count, -(-count // _LANES) * _LANES):
            block[i] = _ZERO
        for first in range(0, count, _LANES):
            for lane in range(_LANES):
                x = logits[start + min(first + lane, count - 1)]
                weight = block[first + lane]
                whole[lane] += weight if x >= least else _ZERO
                above[lane] += weight if x > value else _ZERO
    return above.sum() / whole.sum()


@cpu_jit
def _kth(logits, size, k):
    """The k-th largest value, 0 < k <= size: the root of a heap of the k largest, the least of which is on top."""
    heap = np.full(k, -_INFINITY, dtype=np.float32)
    for token in range(size):
        x = logits[token]
        if not x > heap[0]:
            continue
        place = 0
        while True:
            child = 2 * place + 1
            if child >= k:
                break
            if child + 1 < k and heap[child + 1] < heap[child]:
                child += 1
            if not heap[child] < x:
                break
            heap[place] = heap[child]
            place = child
        heap[place] = x
    return heap[0]


@cpu_jit
def _mixed(x, key):
    """An avalanche over uint32; `key` joins half way. Products wrap when they are cut to 32 bits."""
    x = np.uint32((x ^ (x >> _SHIFTS[0])) * _FACTORS[1]) ^ key
    x = np.uint32((x ^ (x >> _SHIFTS[1])) * _FACTORS[2])
    return x ^ (x >> _SHIFTS[0])


@cpu_jit
def _hash_block(start, low, high, bits):
    """23 bits for each of `_BLOCK` tokens from `start` on."""
    for i in range(_BLOCK):
        x = _mixed(np.uint32(np.uint32(start + i) * _FACTORS[0]), np.uint32(0))
        bits[i] = _mixed(x ^ low, high) >> _SHIFTS[2]


@cpu_jit
def _noise(bits):
    return -np.log(-np.log((np.float32(bits) + _HALF) * _UNIT))


@cpu_jit
def _draw(logits, size, least, temperature, low, high, bounds, bits):
    """argmax of logit / temperature + noise over values >= least."""
    best, winner = -_INFINITY, _NONE
    for start in range(0, size, _BLOCK):
        _hash_block(start, low, high, bits)
        for i in range(min(_BLOCK, size - start)):
            x = logits[start + i]
            if x < least or x == -_INFINITY:
                continue
            score = x / temperature
            if score + bounds[bits[i] >> np.uint32(15)] > best:
                noisy = score + _noise(bits[i])
                if noisy > best:
                    best, winner = noisy, start + i
    return winner


@cpu_jit
def _greedy(logits, size, high):
    for token in range(size):
        if logits[token] == high:
            return token
    return _NONE


@cpu_jit
def _row(logits, size, floats, integers, bounds, bits, block):
    """The token of one row."""
    temperature, top_p, min_p = floats[0], floats[1], floats[2]
    top_k, low, high_key = integers[0], np.uint32(integers[1]), np.uint32(integers[2])
    high = _highest(logits, size)
    if not (high > -_INFINITY):
        return _NONE
    if temperature == _ZERO:
        return _greedy(logits, size, high)
    kth = _kth(logits, size, top_k) if 0 < top_k < size else -_INFINITY
    least = kth
    if min_p > _ZERO:
        least = max(least, high + temperature * np.log(min_p))
    token = _draw(logits, size, least, temperature, low, high_key, bounds, bits)
    if top_p >= _ONE:
        return token
    while token != _NONE and not _likelier(logits, size, kth, logits[token], high, temperature, block) < top_p:
        least = np.nextafter(logits[token], _INFINITY)
        token = _draw(logits, size, least, temperature, low, high_key, bounds, bits)
    return token if token != _NONE else _greedy(logits, size, high)


@kernel
def _sample(words):
    logits, floats, integers, bounds, tokens = words[1], words[2], words[3], words[4], integers_at(words[5])
    rows, size = words[6], words[7]
    bits, block = np.empty(_BLOCK, dtype=np.uint32), np.empty(_BLOCK, dtype=np.float32)
    while True:
        row = take(words)
        if row >= rows:
            break
        tokens[row] = _row(
            floats_at(logits + 4 * row * size),
            size,
            floats_at(floats + 12 * row),
            integers_at(integers + 24 * row),
            floats_at(bounds),
            bits,
            block,
        )
