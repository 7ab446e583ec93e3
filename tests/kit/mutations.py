"""Fences, lease checks and position checks, each taken out in turn: at least one named test must turn red.

A mutation is a replacement in one file that must apply exactly once, made in a copy of the tree. What nothing would
notice is a check that no test holds, and is named at the end. `make mutations` runs all, `make mutations ONLY=append`
those with the word in their names, `make mutations SHARE=2/5` the second fifth of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from kit.mutations_list import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent.parent
COPIED = ("shared", "worker", "detok", "api", "kernels", "deploy", "tests", ".typing", "pyproject.toml")


class Tree:
    """A copy of the sources, in which one mutation stands at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
            else:
                shutil.copy2(source, folder / name)

    def survives(self, mutation: Mutation) -> str | None:
        """What a test run said that did not notice; None when one turned red.

        Raises:
            ValueError: the mutation does not apply exactly once, or the tests did not run.
        """
        path = self.folder / mutation.file
        text = path.read_text()
        if text.count(mutation.old) != 1:
            raise ValueError(f"{mutation.name}: {text.count(mutation.old)} places in {mutation.file}, not one")
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            done = self.test(mutation.tests)
        finally:
            path.write_text(text)
        if done.returncode not in (0, 1):
            raise ValueError(f"{mutation.name}: the tests did not run\n{done.stdout[-3000:]}")
        return done.stdout[-500:] if done.returncode == 0 else None

    def test(self, tests: Sequence[str], *flags: str) -> subprocess.CompletedProcess[str]:
        """pytest over these tests of the copy, with the copy's modules."""
        environment = os.environ | {"PYTHONPATH": str(self.folder / ".typing"), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "60"]
        return subprocess.run(
            [*command, "-m", "not long", *flags, *tests],
            cwd=self.folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip


def survivors(mutations: Sequence[Mutation], workers: int) -> list[str]:
    """The names of those that no test has noticed; `workers` copies of the tree are tested beside each other."""
    with tempfile.TemporaryDirectory(prefix="hr") as folder, ThreadPoolExecutor(workers) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(workers):
            trees.put(Tree(Path(folder) / str(number)))

        def survives(mutation: Mutation) -> bool:
            tree = trees.get()
            try:
                survived = tree.survives(mutation) is not None
            finally:
                trees.put(tree)
            print(f"{'SURVIVES' if survived else 'noticed '} {mutation.name}", flush=True)
            return survived

        found = list(pool.map(survives, mutations))
    return [mutation.name for mutation, survived in zip(mutations, found, strict=True) if survived]


def share(mutations: Sequence[Mutation], which: str) -> Sequence[Mutation]:
    """Every n-th of them, from the k-th on, for `which` k/n: k from 1 to n are all. The empty one is all, too."""
    if not which:
        return mutations
    k, n = map(int, which.split("/"))
    if not 1 <= k <= n:
        raise ValueError(f"SHARE is k/n with k from 1 to n, got {which!r}")
    return mutations[k - 1 :: n]


def main() -> None:
    """`make mutations`."""
    only = os.environ.get("ONLY", "")
    chosen = share([m for m in MUTATIONS if re.search(only, m.name)], os.environ.get("SHARE", ""))
    found = survivors(chosen, os.cpu_count() or 1)
    print(f"{len(chosen)} mutations, {len(found)} survive{': ' if found else ''}{', '.join(found)}")
    raise SystemExit(1 if found else 0)
