"""bench/gpu.sh, whose commands meet a GPU seldom: each exists, takes the flags it is given, and fails alone."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from headrace.shared.settings import load
from headrace.worker.settings import WorkerSettings

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
SECONDS = 600
Finished = tuple[subprocess.CompletedProcess[str], list[list[str]]]
# Stands for a Python with a GPU: it says that there is one, writes down what it is given, fails at bench/kernels.py.
PYTHON = """#!/bin/sh
case "$1" in -c) echo gpu; exit 0;; esac
printf '%s\\037' "$@" >> "$COMMANDS"; echo >> "$COMMANDS"
[ "$1" != bench/kernels.py ]
"""


def bench(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{Path(name).stem}", ROOT / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The script in a folder of its own, and the commands that it gave."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "bench").mkdir()
    (folder / "bench/gpu.sh").write_text((ROOT / "bench/gpu.sh").read_text())
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "COMMANDS": str(folder / "commands"), "TMPDIR": str(folder)}
    done = subprocess.run(
        ["sh", folder / "bench/gpu.sh", python], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    lines = (folder / "commands").read_text().splitlines()
    return done, [line.split("\037")[:-1] for line in lines]


def test_a_part_that_fails_takes_no_other_with_it(
    finished: Finished,
) -> None:
    done, commands = finished
    parts = re.findall(r"^part (\S+) (\d+) ", (ROOT / "bench/gpu.sh").read_text(), re.MULTILINE)
    assert re.findall(r"^== (\S+) \(at most", done.stdout, re.MULTILINE) == [name for name, _ in parts]
    assert len(commands) == len(parts)
    assert (done.returncode, done.stderr.strip()) == (1, "failed: kernels")
    assert sum(int(limit) for _, limit in parts) < SECONDS


def test_every_command_takes_its_flags(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "bench")
    for script, *given in finished[1]:
        if script == "-m":
            files = [each.partition("::") for each in given if each.startswith("tests/")]
            assert len(files) > 1
            assert all(f"def {test}" in (ROOT / file).read_text() for file, _, test in files)
            continue
        module = bench(script, monkeypatch)
        args, flags = module.parser().parse_known_args(given)
        effects = getattr(module, "EFFECTS", {"cuda": ()})["cuda"]
        for more in ((), *(effect.flags for effect in effects)):
            if flags:  # those of a worker, which names what it does not know
                assert load(WorkerSettings, [*flags, *more], script).model
        if script != "bench/random_model.py":
            assert args.output.suffix == ".csv"
