"""The parts of an engine, put together as settings, device and memory have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...kernels.cpu.team import runs_alone
from ...shared.model_card import ModelCard
from ..settings import WorkerSettings
from .attention import AttentionBackend
from .attention_cpu import CpuAttention
from .attention_triton import TritonAttention
from .backends import bytes_per_token, make_backend
from .blocks import BlockAllocator
from .cuda_graphs import DecodeGraphs, Forward, capture_for
from .loader import LoadedModel
from .lora import Adapters
from .memory import num_blocks
from .runner import ModelRunner
from .scheduler import Scheduler

log = logging.getLogger(__name__)

_PROMISES = (
    "may depend on what runs beside it; --deterministic prevents that",
    "do not depend on what runs beside it",
    "do not depend on what runs beside it: each sequence is computed alone, which is slow",
)


def build(settings: WorkerSettings, card: ModelCard, loaded: LoadedModel) -> tuple[Scheduler, ModelRunner]:
    """The pool that memory allows, who shares it out, and the model over it.

    Raises:
        ConfigError: memory does not suffice, or what the settings ask for is not installed.
    """
    on_cpu = loaded.device.type == "cpu"
    max_running = settings.max_running or (32 if on_cpu else 256)
    backend, blocks = _pool(settings, card, loaded, max_running)
    free = loaded.invariant and backend.invariant
    alone = settings.deterministic and not free
    log.info("%s: an answer's bytes %s", card.name, _PROMISES[free + 2 * alone])
    scheduler = Scheduler(
        blocks,
        max_running=max_running,
        max_batch_tokens=settings.max_batch_tokens or max(max_running, 256 if on_cpu else 8192),
        fixed_chunks=alone,
        prefix_cache=settings.prefix_cache != "off",
        speculate=settings.speculate,
    )
    record = None
    if isinstance(backend, TritonAttention) and settings.cuda_graphs and not alone:
        record = _recorder(card, loaded, max_running, settings.block_size)
    if isinstance(backend, CpuAttention) and runs_alone() and torch.get_num_threads() > 1:
        log.warning(
            "%s: this build of torch has no GNU OpenMP, so the CPU kernels run on one thread of %d",
            card.name,
            torch.get_num_threads(),
        )
    grouped = isinstance(backend, TritonAttention)
    adapters = Adapters(loaded.model, limit=settings.max_loras, device=loaded.device, grouped=grouped)
    return scheduler, ModelRunner(loaded.model, loaded.attention, backend, adapters, alone=alone, record=record)


def overlaps(settings: WorkerSettings, device: torch.device) -> bool:
    """Whether steps are planned ahead: guesses would need tokens that nobody knows yet."""
    wanted = settings.overlap == "on" or (settings.overlap == "auto" and device.type != "cpu")
    return wanted and not settings.speculate


def _pool(
    settings: WorkerSettings, card: ModelCard, loaded: LoadedModel, max_running: int
) -> tuple[AttentionBackend, BlockAllocator]:
    """The K/V pool with its attention, and who owns what of it."""
    size = settings.block_size
    place: dict[str, Any] = {"block_size": size, "dtype": loaded.dtype, "device": loaded.device}
    blocks = num_blocks(
        settings,
        bytes_per_token(settings.attention_backend, loaded.layers, **place),
        device=loaded.device,
        context_length=card.context_length,
        max_running=max_running,
    )
    log.info("%s: %d K/V blocks of %d tokens on %s", card.name, blocks - 1, size, loaded.device)
    backend = make_backend(
        settings.attention_backend,
        loaded.layers,
        num_blocks=blocks,
        context_length=card.context_length,
        invariant=settings.deterministic,
        **place,
    )
    return backend, BlockAllocator(blocks, size)


def _recorder(
    card: ModelCard, loaded: LoadedModel, max_running: int, block_size: int
) -> Callable[[Forward], DecodeGraphs] | None:
    """What makes the graphs of a model; None where the device records none."""
    capture = capture_for(loaded.device)
    if capture is None:
        return None
    return partial(
        DecodeGraphs,
        max_rows=max_running,
        context_length=card.context_length,
        block_size=block_size,
        vocab_size=loaded.vocab_size,
        device=loaded.device,
        capture=capture,
    )
