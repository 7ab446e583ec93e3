"""How much memory a worker on a CPU takes for granted: not more than its container has."""

from __future__ import annotations

from pathlib import Path

import pytest
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
