"""Fault 17: each role is replaced under load, one process after another, and no request fails or is asked twice.

Also by another release: the state of the sources before the last change of what processes say to each other, or the
commit that HEADRACE_TEST_PREVIOUS names, comes before this one (an upgrade) or after it (the way back).
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from headrace.shared.clients import connect
from headrace.shared.registry import processes
from kit.deployment import Deployment, terminate
from kit.faults import Reader, counted, unfinished, until
from kit.tokenizers import byte_level

ROOT = Path(__file__).resolve().parent.parent
TEXT = "Grüße, 世界! 🌶 and more"
CLIENTS = 6
ROLES = ("worker", "detok", "api", "batch")


@pytest.fixture
def roles(redis_url: str, tmp_path: Path) -> Iterator[Deployment]:
    steps = [[token] for token in byte_level().spelled(TEXT)]
    with Deployment(redis_url, tmp_path, [{"steps": steps, "finish": "stop", "step_ms": 20}]) as roles:
        yield roles


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the release before."""
    commit = os.environ.get("HEADRACE_TEST_PREVIOUS") or f"{git('rev-list', '-1', 'HEAD', '--', 'shared')}^"
    tree = tmp_path_factory.mktemp("previous")
    archive = tree / "tree.tar"
    git("archive", "--output", str(archive), commit)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="fully_trusted")
    return tree


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no history to take the release before from: {done.stderr.strip()}")
    return done.stdout.strip()


def ready(roles: Deployment, process: subprocess.Popen[bytes]) -> None:
    with connect(roles.redis_url) as store:
        until(
            lambda: any(p.pid == process.pid and p.state == "ready" for p in processes(store)),
            "the new process is not ready",
        )


def test_every_role_is_replaced_under_load(roles: Deployment) -> None:
    replace_all(roles, None, None)


@pytest.mark.parametrize("forward", [True, False], ids=["an upgrade", "the way back"])
def test_every_role_is_replaced_by_another_release(roles: Deployment, previous: Path, forward: bool) -> None:
    before, after = (previous, None) if forward else (None, previous)
    replace_all(roles, before, after)


def replace_all(roles: Deployment, before: Path | None, after: Path | None) -> None:
    """Replace each role's process, of the tree `before`, by one of the tree `after`."""
    old = {role: roles.start(role, tree=before) for role in ROLES}
    roles.ready()
    over, readers, problems = threading.Event(), list[Reader](), list[BaseException]()

    def ask_on() -> None:
        try:
            while not over.is_set():
                readers.append(reader := Reader({"prompt": f"stream {len(readers)}"}, sums=before is after))
                reader.read(roles.url)
        except Exception as e:  # noqa: BLE001 - none may come
            problems.append(e)

    def served_since(count: int) -> bool:
        return bool(problems) or len(readers) > count + CLIENTS

    clients = [threading.Thread(target=ask_on) for _ in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for role in ROLES:
            served = len(readers)
            new = roles.start(role, tree=after)
            ready(roles, new)
            assert terminate(old[role]) == 0
            until(partial(served_since, served), "nobody is served any more")
    finally:
        over.set()
        for client in clients:
            client.join(60)
    assert problems == []
    assert {(reader.text, reader.finish) for reader in readers} == {(TEXT, "stop")}
    with connect(roles.redis_url) as store:
        assert unfinished(store) == 0
        assert counted(store, "submitted") == len(readers)
        assert counted(store, "retries") == 0
