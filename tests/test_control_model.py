"""Weights and adapters changed under real workers, over HTTP: the tokens are those of transformers with the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Server
from kit.control import Control
from kit.deployment import Deployment, terminate
from kit.engines import random_prompts, reference
from kit.tiny_models import build

PROMPTS = random_prompts([6, 11, 17])
TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {f"v{seed}": build(root / f"v{seed}", "llama", seed=seed) for seed in range(3)}


@pytest.fixture(scope="module")
def control(
    redis_server: Server, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Control]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(redis_server.url, folder, model=folders["v0"]) as deployment:
        flags = ("--dtype", "float32", "--kv-memory", "64mb", "--threads", "1")
        control = Control(deployment, *flags, wait_s=20)
        yield control
        control.http.close()


def answer(control: Control, prompt: list[int], count: int = TOKENS, **body: Any) -> Any:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return control.post("/generate", **({"model": "m", "input_ids": prompt, "sampling_params": params} | body))


def tokens(control: Control, prompts: list[list[int]], count: int = TOKENS) -> list[list[int]]:
    """Greedy tokens of prompts that run together."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return [a["output_ids"] for a in threads.map(lambda prompt: answer(control, prompt, count), prompts)]


def expected(folder: Path, count: int = TOKENS) -> list[list[int]]:
    return [reference(folder, prompt, count)[0] for prompt in PROMPTS]


def update(control: Control, folder: Path, **body: Any) -> Any:
    return control.post("/update_weights_from_disk", model_path=str(folder), **body)


def test_all_workers_take_new_weights_together(control: Control, folders: dict[str, Path]) -> None:
    assert tokens(control, PROMPTS * 2) == expected(folders["v0"]) * 2
    done = update(control, folders["v1"], weight_version="one")
    assert [worker["detail"]["weight_version"] for worker in done["workers"]] == ["one"] * 2
    assert tokens(control, PROMPTS * 2) == expected(folders["v1"]) * 2
    info = control.http.get("/model_info").json()
    assert info["weight_version"] == "one"
    assert [worker["extra"]["weight_version"] for worker in info["workers"]] == ["one"] * 2


def test_under_load_each_output_is_one_models_then_the_others(control: Control, folders: dict[str, Path]) -> None:
    """Requests that run while weights change go on: a part of the old model's tokens, then the new one's after them."""
    update(control, folders["v0"])
    prompts, count = random_prompts([5] * 8, seed=5), 60
    with ThreadPoolExecutor(len(prompts)) as threads:
        running = [threads.submit(answer, control, prompt, count) for prompt in prompts]
        update(control, folders["v1"], mode="retract")
        update(control, folders["v2"], mode="retract")
        outputs = [future.result()["output_ids"] for future in running]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == count
        done = 0
        for name in ("v0", "v1", "v2"):
            rest = reference(folders[name], [*prompt, *output[:done]], count - done)[0]
            done += next((i for i, (a, b) in enumerate(zip(rest, output[done:], strict=True)) if a != b), len(rest))
        assert done == count


def test_what_one_worker_cannot_read_no_worker_uses(control: Control, folders: dict[str, Path], tmp_path: Path) -> None:
    update(control, folders["v1"], weight_version="good")
    broken = tmp_path / "broken"
    shutil.copytree(folders["v0"], broken)
    (broken / "model.safetensors").unlink()
    message = control.error("/update_weights_from_disk", 400, model_path=str(broken))
    assert message.startswith("The weights cannot be read")
    assert "sees no folder" in control.error("/update_weights_from_disk", 400, model_path=str(tmp_path / "gone"))
    assert "Missing" in control.error("/update_weights_from_disk", 400)
    assert tokens(control, PROMPTS) == expected(folders["v1"])
    assert control.http.get("/model_info").json()["weight_version"] == "good"


def test_a_worker_that_comes_later_serves_what_the_others_do(control: Control, folders: dict[str, Path]) -> None:
    update(control, folders["v2"], weight_version="two")
    first, second = control.workers
    assert terminate(first) == 0
    control.workers[:] = [second, control.start()]
    control.wait_for(2)
    assert {worker.extra["weight_version"] for worker in control.ready()} == {"two"}
    assert terminate(second) == 0
    assert tokens(control, PROMPTS) == expected(folders["v2"])
