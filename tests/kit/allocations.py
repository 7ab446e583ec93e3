"""How many bytes of tensors live at one time: what torch's operations made, not what the process happens to hold."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Allocations() as seen: …` counts the storages that operations in the block made; `seen.peak` in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {_storage(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for made in pytree.tree_leaves(out):
            if isinstance(made, torch.Tensor) and _storage(made) not in given | self._known:
                self._count(made.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
