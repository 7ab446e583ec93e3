"""All layers of a model as one program: a step that only decodes is a single call into compiled code.

the model calls    layer 0 ─► layer 1 ─► … ─► layer n        each hands on what it was given, and the last runs all
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...kernels.cpu.program import Memory, Program
from .attention import PagedAttention
from .attention_cpu import MAX_ROWS, CpuAttention
from .fused_layer import Angles, FusedLayer


def install(layers: Sequence[nn.Module], attention: PagedAttention) -> FusedStack | None:
    """Let the fused `layers`, which are all that attend, decode as one; None where one of them cannot."""
    fused = [layer.forward for layer in layers]
    known = [layer for layer in fused if isinstance(layer, FusedLayer) and layer.whole]
    if len(known) < len(attention.options):
        return None
    stack = FusedStack(known, attention)
    for number, layer in enumerate(layers):
        layer.forward = partial(stack, number)
    return stack


def remove(layers: Sequence[nn.Module], stack: FusedStack) -> None:
    """Let each layer compute for itself again."""
    for layer, fused in zip(layers, stack.layers, strict=True):
        layer.forward = fused


@dataclass(frozen=True, slots=True)
class _Step:
    """A program for so many rows, and where it reads and writes: x and out [T, width], and the angles of each kind of
    layer."""

    program: Program
    x: torch.Tensor
    out: torch.Tensor
    kinds: tuple[int, ...]
    angles: tuple[Angles, ...]

    def run(self, x: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        self.x.copy_(x)
        for places, numbers in zip(self.angles, angles, strict=True):
            for place, number in zip(places, numbers, strict=True):
                place.copy_(number)
        self.program.run()
        return self.out


class FusedStack:
    """The forwards of a model's layers."""

    def __init__(self, layers: Sequence[FusedLayer], attention: PagedAttention) -> None:
        self.layers = tuple(layers)
        self._attention = attention
        self._backend: CpuAttention | None = None  # whose pool the programs write to
        self._memory = Memory(MAX_ROWS)
        self._steps: dict[int, _Step] = {}
        self._waiting: list[Angles] = []  # of the layers that have handed on what they were given
        self._one = False

    def __call__(self, number: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The forward of layer `number`. hidden_states [1, T, width] float32 → the same."""
        layer = self.layers[number]
        angles = layer.angles(args, kwargs)
        if number == 0:
            self._one, self._waiting = self._decodes(), []
        if self._one and angles is None:
            self._one, hidden_states = False, self._catch_up(hidden_states)
        if not self._one or angles is None:
            return layer(hidden_states, *args, **kwargs)
        self._waiting.append(angles)
        if number + 1 < len(self.layers):
            return hidden_states
        return self._run(hidden_states[0])[None]

    def _decodes(self) -> bool:
        backend, batch = self._attention.backend, self._attention.batch
        if not isinstance(backend, CpuAttention) or batch is None or not backend.decodes(batch):
            return False
        if backend is not self._backend:
            self._backend, self._steps = backend, {}
        backend.plan(batch)
        return True

    def _catch_up(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states[0].contiguous()
        for layer, angles in zip(self.layers, self._waiting, strict=False):
            x = layer.compute(x, angles)
        return x[None]

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        kinds, angles = _kinds(self._waiting)
        step = self._steps.get(x.shape[0])
        if step is None or step.kinds != kinds:
            step = self._steps[x.shape[0]] = self._record(x, kinds, angles)
        return step.run(x, angles)

    def _record(self, x: torch.Tensor, kinds: tuple[int, ...], angles: Sequence[Angles]) -> _Step:
        program, places = Program(self._memory), [(cos.clone(), sin.clone()) for cos, sin in angles]
        first = out = torch.empty_like(x, memory_format=torch.contiguous_format)
        with program.record():
            for layer, kind in zip(self.layers, kinds, strict=True):
                self._memory.turn()
                out = layer.compute(out, places[kind])
        return _Step(program, first, out, kinds, tuple(places))


def _kinds(angles: Sequence[Angles]) -> tuple[tuple[int, ...], list[Angles]]:
    """Which layers share their angles: the number of each one's, and those."""
    kinds: dict[int, int] = {}
    for pair in angles:
        kinds.setdefault(id(pair[0]), len(kinds))
    numbers = tuple(kinds[id(pair[0])] for pair in angles)
    return numbers, [angles[numbers.index(kind)] for kind in range(len(kinds))]
