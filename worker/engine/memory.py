"""How many K/V blocks the pool gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from ...shared.errors import ConfigError
from ..settings import WorkerSettings

# Of what is free once the weights are loaded. A GPU is ours alone; a CPU's memory is shared with Redis and the rest.
_GPU_SHARE = 0.85
_CPU_SHARE = 0.25

# Limit, use, and what of the use is files that make room when asked: of control groups by controller, "" is version 2.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def num_blocks(
    settings: WorkerSettings,
    token_bytes: int,
    *,
    device: torch.device,
    context_length: int,
    max_running: int,
) -> int:
    """Blocks of the pool, with the null block, where the K/V of a token take `token_bytes`.

    No more than `max_running` whole contexts, and at least one.

    Raises:
        ConfigError: the memory does not hold one whole context.
    """
    block_bytes = settings.block_size * token_bytes
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
    """Bytes that this process may still take: what the machine has, or a control group allows where that is less."""
    return min(_machine_ram(), *_left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")))


def _machine_ram() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _left_in_groups(root: Path, own: Path) -> Iterator[int]:
    """What is left under each memory limit of a process: those of its control group, as a container has one, and of
    the groups around it. Nothing where there are no groups.

    Args:
        root: where the groups are mounted.
        own: names the process's group, by controller.
    """
    try:
        groups = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in groups:
        if controllers in _GROUP_FILES:
            base = root / controllers
            group = base / path.strip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(base):
                    yield from _left(folder, *_GROUP_FILES[controllers])


def _left(folder: Path, limit_file: str, used_file: str, cache: str) -> Iterator[int]:
    try:
        limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or "max": no limit
        return
    yield max(limit - used + int(counters.get(cache, 0)), 0)
