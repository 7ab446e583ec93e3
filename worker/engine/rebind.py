"""A kernel under the name of a function that transformers keeps as a global beside the classes that call it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

ROTARY = "apply_rotary_pos_emb"


def rebind(model: nn.Module, name: str, kernel_for: Callable[[Any], Callable[..., Any] | None]) -> int:
    """Let the modules of `model` whose forward names the global `name` find a kernel there. They get a forward with
    globals of its own; other models of the process keep theirs.

    Args:
        kernel_for: from the function, one for each architecture, to what computes the same; None where nothing does.

    Returns:
        How many modules find it.
    """
    count = 0
    kernels: dict[Any, Callable[..., Any] | None] = {}
    for module in model.modules():
        forward: Any = inspect.unwrap(type(module).forward)
        code: types.CodeType | None = getattr(forward, "__code__", None)
        if code is None or name not in code.co_names or "forward" in vars(module):
            continue
        original = forward.__globals__.get(name)
        if original is None:
            continue
        if original not in kernels:
            kernels[original] = kernel_for(original)
        if (kernel := kernels[original]) is not None:
            names = {**forward.__globals__, name: kernel}
            copy = types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)
            copy.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(copy, module)
            count += 1
    return count
