"""Every kernel compiles for the GPUs that people have, within their shared memory; no GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parent / "kit" / "triton_compile.py"
# Bytes of shared memory that one program may have: T4, A100, L4, H100 and H200.
SHARED = {75: 65536, 80: 166912, 89: 101376, 90: 232448}
# Bytes of registers that do not fit, of the worst program: none by triton 3.7, 96 of the extend kernel by 3.9.
SPILLED = 96


def compile_all(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def kernels() -> set[str]:
    """The kernels there are: jitted functions whose names say so."""
    folder = Path(__file__).resolve().parent.parent / "kernels"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    return set(re.findall(r"^def (_\w+_kernel)\(", text, re.MULTILINE))


def test_for_an_a100(tmp_path: Path) -> None:
    compiled = compile_all(tmp_path, "80")
    assert {each["kernel"] for each in compiled} == kernels()
    assert all(each["shared"] <= SHARED[80] and each["spilled"] <= SPILLED for each in compiled)


@pytest.mark.long
@pytest.mark.parametrize("capability", SHARED)
def test_all_variants(capability: int, tmp_path: Path) -> None:
    compiled = compile_all(tmp_path, "--all", str(capability))
    assert {each["kernel"] for each in compiled} == kernels()
    assert [each for each in compiled if each["shared"] > SHARED[capability]] == []
