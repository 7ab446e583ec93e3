"""How many K/V blocks the pool gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ...shared.errors import ConfigError
from ..settings import WorkerSettings
from .kv_cache import LayerShape

# Of what is free once the weights are loaded. A GPU is ours alone; a CPU's memory is shared with Redis and the rest.
_GPU_SHARE = 0.85
_CPU_SHARE = 0.25


def num_blocks(
    settings: WorkerSettings,
    layers: Sequence[LayerShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    max_running: int,
) -> int:
    """Blocks of the pool, with the null block.

    No more than `max_running` whole contexts, and at least one.

    Raises:
        ConfigError: the memory does not hold one whole context.
    """
    block_bytes = settings.block_size * sum(shape.bytes_per_token(dtype) for shape in layers)
    context = -(-context_length // settings.block_size)
    memory = settings.kv_memory or _free_memory(device)
    blocks = min(memory // block_bytes - 1, context * max_running)
    if blocks < context:
        raise ConfigError(
            f"--kv-memory (HEADRACE_KV_MEMORY): there are {memory >> 20} MiB, and one context of {context_length} "
            f"tokens needs {(context + 1) * block_bytes >> 20} MiB; "
            "give more, or a smaller --context-length"
        )
    return blocks + 1


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(_available_ram() * _CPU_SHARE)


def _available_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
