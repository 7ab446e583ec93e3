"""Weights and adapters changed under real workers, over HTTP: the tokens are those of transformers with the same."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
from conftest import Server
from headrace.shared import keys
from headrace.shared.clients import connect
from kit.adapters import make, merge
from kit.control import Control
from kit.deployment import Deployment, terminate
from kit.engines import random_prompts, reference
from kit.serving import wait_until
from kit.tiny_models import build
from prometheus_client.parser import text_string_to_metric_families

PROMPTS = random_prompts([6, 11, 17])
TOKENS = 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {f"v{seed}": build(root / f"v{seed}", "llama", seed=seed) for seed in range(3)}


@pytest.fixture(scope="module")
def deployed(
    redis_server: Server, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Control]:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    folder = tmp_path_factory.mktemp("deployment")
    with Deployment(redis_server.url, folder, model=folders["v0"]) as deployment:
        flags = ("--dtype", "float32", "--kv-memory", "64mb", "--threads", "1", "--profile-dir", str(folder / "traces"))
        control = Control(deployment, *flags, wait_s=20)
        yield control
        control.http.close()


@pytest.fixture
def control(deployed: Control) -> Control:
    deployed.refill()
    return deployed


def question(prompt: list[int], count: int = TOKENS) -> dict[str, Any]:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"model": "m", "input_ids": prompt, "sampling_params": params}


def answer(control: Control, prompt: list[int], count: int = TOKENS, **body: Any) -> Any:
    return control.post("/generate", **(question(prompt, count) | body))


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
        update(control, folders["v2"], mode="retract")  # a version is named after its folder
        answers = [future.result() for future in running]
    outputs = [each["output_ids"] for each in answers]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == count
        done = 0
        for name in ("v0", "v1", "v2"):
            rest = reference(folders[name], [*prompt, *output[:done]], count - done)[0]
            done += next((i for i, (a, b) in enumerate(zip(rest, output[done:], strict=True)) if a != b), len(rest))
        assert done == count
        assert name in folders
        assert answers[prompts.index(prompt)]["meta_info"]["weight_version"] == name


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


def test_a_worker_that_comes_later_serves_what_the_others_do(
    control: Control, folders: dict[str, Path], tmp_path: Path
) -> None:
    update(control, folders["v2"], weight_version="two")
    adapter = make(tmp_path / "style", folders["v2"])
    control.post("/load_lora_adapter", lora_name="style", lora_path=str(adapter))
    first, second = control.workers
    assert terminate(first) == 0
    control.workers = [second, control.start()]
    control.wait_for(2)
    assert {worker.extra["weight_version"] for worker in control.ready()} == {"two"}
    assert [worker.extra["loras"] for worker in control.ready()] == [["style"]] * 2
    assert terminate(second) == 0
    assert tokens(control, PROMPTS) == expected(folders["v2"])
    merged = merge(tmp_path / "merged", folders["v2"], adapter)
    styled = [answer(control, prompt, model="style")["output_ids"] for prompt in PROMPTS]
    assert styled == expected(merged)
    control.post("/unload_lora_adapter", lora_name="style")


def test_a_worker_that_dies_while_weights_are_read_leaves_the_others_as_they_were(
    control: Control, folders: dict[str, Path]
) -> None:
    update(control, folders["v0"], weight_version="before")
    dying = control.workers[0]
    dying.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        path = str(folders["v1"])
        change = threads.submit(control.error, "/update_weights_from_disk", 504, model_path=path)
        wait_until(lambda: under_way(control), "the change has begun")
        assert "is under way" in control.error("/update_weights_from_disk", 409, model_path=path)
        dying.kill()
        control.bury(dying)
        message = change.result()
    assert message == f"Ended before an answer: worker {socket.gethostname()}:{dying.pid}. Nothing changed."
    assert tokens(control, PROMPTS) == expected(folders["v0"])
    assert [worker.extra["weight_version"] for worker in control.ready()] == ["before"]
    assert len(update(control, folders["v1"])["workers"]) == 1  # and the next change is free to come
    assert tokens(control, PROMPTS) == expected(folders["v1"])


def under_way(control: Control) -> bool:
    with connect(control.deployment.redis_url) as store:
        return bool(store.exists(keys.control_lock("m")))


def test_adapters_are_loaded_mixed_and_unloaded_under_load(
    control: Control, folders: dict[str, Path], tmp_path: Path
) -> None:
    update(control, folders["v0"], weight_version="base")
    adapters = {name: make(tmp_path / name, folders["v0"], seed=i) for i, name in enumerate(("a", "b", "c"))}
    merged = {name: merge(tmp_path / f"{name}-merged", folders["v0"], adapters[name]) for name in adapters}
    wanted = {name: expected(folder) for name, folder in (merged | {"m": folders["v0"]}).items()}
    stop = threading.Event()

    def load_of(name: str) -> int:
        """Ask until told to stop; each answer is right, or says that the adapter is not there."""
        served = 0
        while not stop.is_set():
            for prompt, output in zip(PROMPTS, wanted[name], strict=True):
                got = control.http.post("/generate", json=question(prompt) | {"model": name})
                assert got.status_code in ((200,) if name == "m" else (200, 404)), got.text
                if got.status_code == 200:
                    assert got.json()["output_ids"] == output
                    served += 1
        return served

    with ThreadPoolExecutor(4) as threads:
        loads = {name: threads.submit(load_of, name) for name in wanted}
        for _ in range(2):
            for name, folder in adapters.items():
                done = control.post("/load_lora_adapter", lora_name=name, lora_path=str(folder))
                assert len({worker["detail"]["weight_version"] for worker in done["workers"]}) == 1
                assert answer(control, PROMPTS[0], model=name)["output_ids"] == wanted[name][0]
            for name in adapters:
                control.post("/unload_lora_adapter", lora_name=name)
        stop.set()
        assert all(load.result() > 0 for load in loads.values())
    assert [model["id"] for model in control.http.get("/v1/models").json()["data"]] == ["m"]


def test_an_adapter_is_a_model_of_its_own(control: Control, folders: dict[str, Path], tmp_path: Path) -> None:
    update(control, folders["v0"])
    folder = make(tmp_path / "style", folders["v0"])
    control.post("/load_lora_adapter", lora_name="style", lora_path=str(folder), model="m")
    card = control.http.get("/v1/models/style").json()
    assert (card["id"], card["root"], card["parent"]) == ("style", "m", "m")
    assert [worker.extra["loras"] for worker in control.ready()] == [["style"]] * 2
    text = control.post("/v1/completions", model="style", prompt="hi", max_tokens=5, temperature=0)
    assert text["model"] == "style"
    control.post("/unload_lora_adapter", lora_name="style")
    assert "does not exist" in control.error("/v1/completions", 404, model="style", prompt="hi")
    assert "no adapter 'style'" in control.error("/unload_lora_adapter", 404, lora_name="style")


def test_a_bad_adapter_is_refused_and_nothing_changes(
    control: Control, folders: dict[str, Path], tmp_path: Path
) -> None:
    update(control, folders["v0"])
    folder = make(tmp_path / "wide", build(tmp_path / "other", "llama", hidden_size=32))
    message = control.error("/load_lora_adapter", 400, lora_name="wide", lora_path=str(folder))
    assert message.startswith("The adapter cannot be loaded: model.layers.0.self_attn.")
    assert "sees no folder" in control.error("/load_lora_adapter", 400, lora_name="x", lora_path=str(tmp_path / "no"))
    good = make(tmp_path / "good", folders["v0"])
    assert "no adapter" in control.error("/load_lora_adapter", 409, lora_name="m", lora_path=str(good))
    assert tokens(control, PROMPTS) == expected(folders["v0"])
    assert [model["id"] for model in control.http.get("/v1/models").json()["data"]] == ["m"]


def test_workers_are_measured_and_traced(control: Control, folders: dict[str, Path]) -> None:
    before = measured(control)
    started = control.post("/start_profile", num_steps=500)
    tokens(control, PROMPTS * 4)
    done = control.post("/stop_profile")
    begun = {worker["id"]: worker["detail"]["trace"] for worker in started["workers"]}
    for worker in done["workers"]:
        assert worker["detail"]["trace"] == begun[worker["id"]]
        assert json.loads(Path(worker["detail"]["trace"]).read_text())["traceEvents"]
    assert "No trace is being made" in control.error("/stop_profile", 409)
    assert "Invalid value for 'num_steps'" in control.error("/start_profile", 400, num_steps=0)

    def gained() -> float:
        return measured(control)["headrace_worker_tokens", "decode"] - before["headrace_worker_tokens", "decode"]

    wait_until(lambda: gained() >= 4 * len(PROMPTS) * TOKENS, "the heartbeats tell of every token")
    after = measured(control)
    for phase in ("pull", "schedule", "forward", "sample", "publish"):
        assert after["headrace_worker_phase_seconds", phase] > before["headrace_worker_phase_seconds", phase]
    assert after["headrace_worker_kv_blocks", ""] > 0


def measured(control: Control) -> dict[tuple[str, str], float]:
    """What /metrics says of all workers together, by family and third label."""
    out: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(control.http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("headrace_worker"):
                assert sample.labels["model"] == "m"
                rest = "".join(value for name, value in sample.labels.items() if name not in ("model", "worker"))
                out[family.name, rest] = out.get((family.name, rest), 0) + sample.value
    return out
