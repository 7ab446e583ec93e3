"""exp and what is made of it, in plain arithmetic that LLVM turns into vectors; libm's would be called one by one."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from .team import cpu_jit

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # ln 2 in two parts, the first with few bits, so that n * _LN2_HIGH is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, which the low bits then hold


@intrinsic
def _power_of_two(typing: Any, shifted: Any) -> Any:
    """2**n as float32, where `shifted` is n + _ROUND. In LLVM, since numba would add in 64 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(32)
        n = builder.add(builder.bitcast(arguments[0], integer), integer(127))
        return builder.bitcast(builder.shl(n, integer(23)), ir.FloatType())

    return types.float32(types.float32), generate


@cpu_jit
def exp(x):
    """e**x of a float32 to 2 units in the last place; 0 below -87, and the largest finite power above 88; NaN stays."""
    return _exp_within(min(max(x, np.float32(-87.3)), np.float32(88.3)) if x == x else x)


@cpu_jit
def exp_below(x):
    """e**x of a float32 that is not above 0, or NaN: the same bits with less to do."""
    return _exp_within(np.float32(-87.3) if x < np.float32(-87.3) else x)


@cpu_jit
def _exp_within(x):
    """e**x from -87.3 to 88.3."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = p * r * r + r + np.float32(1.0)
    return y * _power_of_two(shifted)


@cpu_jit
def tanh(x):
    """Hyperbolic tangent of a float32."""
    return np.float32(1.0) - np.float32(2.0) / (exp(np.float32(2.0) * x) + np.float32(1.0))


@cpu_jit
def silu(x):
    """x * sigmoid(x) of a float32."""
    return x / (np.float32(1.0) + exp(-x))


@cpu_jit
def gelu_tanh(x):
    """GELU of a float32 in its tanh form."""
    inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1.0) + tanh(inner))
