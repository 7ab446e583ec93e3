"""Linears of one input as one product, while each stays a module of its own to what calls it or hooks into it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Together:
    """One product for `parts` modules that are asked one after the other about the same input: whichever is asked first
    computes for all, and what the others change in their columns of it stays so.

    Args:
        whole: x [..., K] -> [..., outputs of all].
    """

    def __init__(self, whole: Callable[[torch.Tensor], torch.Tensor], parts: int) -> None:
        self._whole = whole
        self._parts = frozenset(range(parts))
        self._left: set[int] = set()
        self._x: torch.Tensor | None = None
        self._out: torch.Tensor | None = None

    def of(self, x: torch.Tensor, part: int) -> torch.Tensor:
        """The outputs of all, asked for by one. Kept until each has asked, so that nothing lives between two layers."""
        if x is not self._x or part not in self._left or self._out is None:
            self._x, self._out, self._left = x, self._whole(x), set(self._parts)
        out = self._out
        self._left.discard(part)
        if not self._left:
            self._x, self._out = None, None
        return out
