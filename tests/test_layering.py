"""Imports point one way, and the roles without a model never load torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("shared", "kernels", "worker", "detok", "api", "deploy")
MAY_IMPORT = {
    "shared": set(),
    "kernels": set(),
    "worker": {"shared", "kernels"},
    "detok": {"shared"},
    "api": {"shared"},
    "deploy": {"shared", "worker", "detok", "api"},
}
HEAVY = {"torch", "transformers", "triton", "accelerate"}
MAY_LOAD = {"worker": HEAVY, "kernels": {"torch", "triton"}}
FETCH = Path("deploy/convert.py")  # a process of its own that writes weights out


@dataclass(frozen=True)
class Import:
    """One import statement: `layer` is set when it names one of ours."""

    file: Path
    line: int
    package: str
    layer: str | None
    at_top: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.layer or self.package}"


def sources() -> list[Path]:
    return [path.relative_to(ROOT) for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports(file: Path) -> Iterator[Import]:
    tree = ast.parse((ROOT / file).read_text())
    package = ["headrace", *file.parent.parts]
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lazy = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            inside = [*base, *(node.module.split(".") if node.module else [])]
            names = [inside] if len(inside) > 1 or not base else [[*inside, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            ours = name[1] if name[0] == "headrace" and len(name) > 1 else None
            yield Import(file, node.lineno, name[0], ours, id(node) not in lazy)


def test_the_folders_are_the_packages() -> None:
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    assert packaging == {f"headrace.{layer}": layer for layer in LAYERS}
    assert {path.name for path in (ROOT / ".typing" / "headrace").iterdir()} == set(LAYERS)


def test_a_layer_imports_only_what_is_below_it() -> None:
    seen = [i for file in sources() for i in imports(file) if i.layer]
    assert len(seen) > 100  # the reading of imports works
    wrong = [str(i) for i in seen if i.layer != (mine := i.file.parts[0]) and i.layer not in MAY_IMPORT[mine]]
    assert wrong == []


def test_deploy_imports_a_role_only_when_a_command_needs_it() -> None:
    lower = {"worker", "detok", "api"}
    wrong = [
        str(i)
        for file in sources()
        if file.parts[0] == "deploy"
        for i in imports(file)
        if i.at_top and i.layer in lower
    ]
    assert wrong == []


def test_our_own_imports_are_relative() -> None:
    wrong = []
    for file in sources():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            wrong += [f"{file} imports {name}" for name in names if name.split(".")[0] in ("headrace", *LAYERS)]
    assert wrong == []


def test_only_worker_and_kernels_load_torch() -> None:
    wrong = [
        str(i)
        for file in sources()
        for i in imports(file)
        if i.package in HEAVY - MAY_LOAD.get(i.file.parts[0], set()) and (i.at_top or i.file != FETCH)
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", ["shared", "kernels"])
def test_init_is_a_docstring_only(layer: str) -> None:
    body = ast.parse((ROOT / layer / "__init__.py").read_text()).body
    assert len(body) == 1
    assert isinstance(body[0], ast.Expr)


LIGHT = [
    "headrace.deploy.cli",
    "headrace.deploy.supervisor",
    "headrace.deploy.doctor",
    "headrace.deploy.bench",
    "headrace.detok.main",
    "headrace.api.main",
    "headrace.api.batches.main",
    "headrace.worker.main",
    "headrace.worker.scripted",
]


@pytest.mark.parametrize("module", LIGHT)
def test_roles_without_a_model_load_no_torch(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps([m for m in sys.modules if '.' not in m]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert HEAVY & set(json.loads(done.stdout)) == set()


def test_help_loads_next_to_nothing() -> None:
    code = (
        "import sys; from headrace.deploy.cli import main; main(['--help']); "
        "print([m for m in ('fastapi', 'pydantic', 'redis', 'httpx', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert "headrace COMMAND" in done.stdout
    assert done.stderr.strip() == "[]"


def test_the_readme_has_a_line_for_every_file() -> None:
    """The tree at its end names each module and script under its folder, and none that is gone."""
    listed: set[str] = set()
    folder = ""
    for line in (ROOT / "README.md").read_text().rpartition("<details>")[2].splitlines():
        if line.endswith("/") and not line.startswith(" "):
            folder = line
        elif line.startswith("  "):
            listed.add(folder + line.split()[0])
    there = {
        str(path.relative_to(ROOT))
        for top in (*LAYERS, "tests", "bench", "docs")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".lua", ".md", ".sh") and path.name != "__init__.py"
    }
    assert {name for name in listed if not name.startswith("deploy/") or name.endswith(".py")} == there
