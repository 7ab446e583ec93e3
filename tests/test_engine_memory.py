"""How much memory a worker on a CPU takes for granted: not more than its container has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.worker.engine.backends import bytes_per_token, make_backend
from headrace.worker.engine.kv_cache import LayerShape
from headrace.worker.engine.memory import _left_in_groups

V2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 150\n"}
V1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "700",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 150\n",
}


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("place", "files", "own"),
    [
        ("", V2, "0::/\n"),
        ("a/b", V2, "0::/a/b\n"),
        ("a", V2, "0::/a/b\n"),  # the limit of a group around it
        ("", V2, "0::/of/the/host\n"),  # a container that sees its own group alone, and the host's name for it
        ("memory", V1, "5:memory:/docker/abc\n1:cpu:/docker/abc\n"),
    ],
)
def test_what_a_control_group_leaves(place: str, files: dict[str, str], own: str, tmp_path: Path) -> None:
    group(tmp_path / "groups" / place, files)
    (tmp_path / "own").write_text(own)
    assert list(_left_in_groups(tmp_path / "groups", tmp_path / "own")) == [450]


@pytest.mark.parametrize(("files", "left"), [(V2 | {"memory.max": "max"}, []), (V2 | {"memory.max": "500"}, [0])])
def test_no_limit_and_one_that_is_reached(files: dict[str, str], left: list[int], tmp_path: Path) -> None:
    group(tmp_path / "groups", files)
    (tmp_path / "own").write_text("0::/\n")
    assert list(_left_in_groups(tmp_path / "groups", tmp_path / "own")) == left


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert list(_left_in_groups(tmp_path, tmp_path / "own")) == []


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_pool_takes_what_was_counted(name: str) -> None:
    """V is filled up to whole panels in the CPU kernels' pool, which counts as well."""
    layers = [LayerShape(2, 24, 20), LayerShape(1, 32, 32)]
    place: dict[str, Any] = {"block_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    pool: Any = make_backend(name, layers, num_blocks=3, **place).pool
    tensors = [*pool.keys, *pool.values] if name == "auto" else [t for n in (0, 1) for t in pool.pools(n)]
    counted = bytes_per_token(name, layers, **place)
    assert sum(tensor.nbytes for tensor in tensors) == 3 * 16 * counted
