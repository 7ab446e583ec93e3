"""Adapters over one model, several in one batch: each row of a step has the adapter of its sequence, or none.

A forward hook on a linear adds what the adapters of the step add to its output. A linear has a hook only while a loaded
adapter, or one that a sequence still runs with, has factors for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...shared.errors import Conflict, NotFound
from .adapter import Adapter
from .lora_step import Grouped, OneByOne, Planner, Step
from .plan import Slice


def sites(model: nn.Module) -> dict[str, nn.Module]:
    """The linears that take an adapter, by path. The output head is none of them: it sees the sampled rows alone."""
    ours: Any = model
    head = ours.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return {path: module for path, module in model.named_modules() if module is not head and _shape(module)}


def linears(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each of `sites`."""
    return {path: shape for path, module in sites(model).items() if (shape := _shape(module)) is not None}


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear, ours among them."""
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    inputs, outputs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return (inputs, outputs) if isinstance(inputs, int) and isinstance(outputs, int) else None


class Adapters:
    """The adapters of one model by name.

    Args:
        limit: how many may be loaded at a time.
        grouped: compute the adapters of a step together, by Triton's kernels.
    """

    def __init__(self, model: nn.Module, *, limit: int, device: torch.device, grouped: bool = False) -> None:
        self._limit = limit
        self._loaded: dict[str, Adapter] = {}
        self._planner: Planner = Grouped(device) if grouped else OneByOne(device)
        self._step: Step | None = None
        self._hooks: dict[nn.Module, Any] = {}
        self._hooked: set[str] = set()  # paths of linears with a hook
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Serve over this model from now on, whose linears are those of the one before."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._sites = sites(model)
        self._paths = {module: path for path, module in self._sites.items()}
        paths, self._hooked = self._hooked, set()
        self._hook(paths)

    def get(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def ids(self) -> dict[str, str]:
        """The content id of each adapter by name."""
        return {name: adapter.id for name, adapter in self._loaded.items()}

    def check_room(self, name: str) -> None:
        """Raises Conflict where one more than may be loaded would be."""
        if name not in self._loaded and len(self._loaded) >= self._limit:
            names = ", ".join(f"'{other}'" for other in self._loaded) or "none"
            raise Conflict(f"--max-loras of the worker is {self._limit}, and loaded are {names}; unload one first")

    def add(self, name: str, adapter: Adapter) -> None:
        """Serve an adapter under a name, in the place of one that had it: that one's sequences go on with it.

        Raises:
            Conflict: as `check_room`.
        """
        self.check_room(name)
        self._loaded[name] = adapter
        self._hook(adapter.factors)

    def drop(self, name: str) -> None:
        """Forget an adapter; sequences that run with it go on with it.

        Raises:
            NotFound: there is none of that name.
        """
        if name not in self._loaded:
            raise NotFound(f"no adapter '{name}' is loaded", param="lora_name")
        del self._loaded[name]

    @contextmanager
    def over(self, slices: Iterable[Slice]) -> Iterator[None]:
        """Add to a forward's linears what the slices' adapters add. `slices` stand in the order of their rows."""
        self._step = self._planner.plan(slices, self._loaded.values())
        self._unhook()
        try:
            yield
        finally:
            self._step = None

    def _hook(self, paths: Iterable[str]) -> None:
        self._hooked.update(paths)
        for path in self._hooked:
            module = self._sites[path]
            if module not in self._hooks:
                self._hooks[module] = module.register_forward_hook(self._add)

    def _unhook(self) -> None:
        """Once nothing is loaded and nothing runs with an adapter, linears are as they were."""
        if self._hooks and not self._loaded and self._step is None:
            for hook in self._hooks.values():
                hook.remove()
            self._hooks, self._hooked = {}, set()

    def _add(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self._step is None:
            return
        x, y = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])  # never a copy: it is added to in place
        if x.shape[0] != self._step.total:  # the step's error, and not the end of the worker
            raise ValueError(f"{type(module).__name__} with an adapter does not see every row of a step")
        self._step.add(self._paths[module], x, y)
