"""What an engine says of its steps, and the trace that it makes of some."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headrace.shared.errors import Conflict, InvalidRequest
from headrace.worker.meter import Meter
from kit.engines import job, random_prompts, run, tiny_engine
from kit.tiny_models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("m"), "llama")


def test_steps_and_tokens_are_counted(folder: Path) -> None:
    engine = tiny_engine(folder)
    prompt = random_prompts([30])[0]  # two chunks of the step's 24 tokens
    run(engine, [job("a", prompt, max_new_tokens=5)])
    stats = engine.stats()
    assert (stats["steps"], stats["prefill_tokens"], stats["decode_tokens"]) == (2 + 4, 29, 5)
    assert (stats["prefix_queried_tokens"], stats["prefix_hit_tokens"]) == (30, 0)
    assert (stats["sequences_running"], stats["sequences_waiting"], stats["kv_blocks_used"]) == (0, 0, 0)
    assert min(stats[f"{phase}_seconds"] for phase in ("schedule", "forward", "sample")) > 0
    for i in range(10):
        engine.add(job(f"b{i}", prompt))
    engine.step()
    full = engine.stats()
    assert full["sequences_running"] + full["sequences_waiting"] == 10
    assert 0 < full["kv_blocks_used"] < full["kv_blocks"]
    assert full["prefix_hit_tokens"] > 0
    engine.close()


def test_time_is_counted_also_where_a_phase_fails() -> None:
    meter = Meter("a", "b")
    with pytest.raises(ZeroDivisionError):
        meter.timed("a", lambda: 1 / 0)
    assert meter.timed("a", pow, 2, 3) == 8
    assert meter.seconds["a"] > 0 == meter.seconds["b"]


def test_a_trace_ends_after_its_steps_or_when_told(folder: Path, tmp_path: Path) -> None:
    engine = tiny_engine(folder, profile_dir=str(tmp_path / "traces"))
    path = Path(engine.start_profile(3))
    with pytest.raises(Conflict, match="3 steps are left"):
        engine.start_profile(3)
    run(engine, [job("a", [5, 6, 7])])
    events = json.loads(path.read_text())["traceEvents"]
    assert any(event.get("name") == "aten::embedding" for event in events)
    with pytest.raises(Conflict, match="no trace is being made"):
        engine.stop_profile()
    second = engine.start_profile(1000)
    run(engine, [job("b", [5, 6, 7])])
    assert engine.stop_profile() == second != str(path)
    assert json.loads(Path(second).read_text())["traceEvents"]
    engine.close()


def test_without_a_folder_there_is_no_trace(folder: Path, tmp_path: Path) -> None:
    engine = tiny_engine(folder)
    with pytest.raises(InvalidRequest, match="--profile-dir"):
        engine.start_profile(1)
    engine.close()
    (tmp_path / "file").touch()
    blocked = tiny_engine(folder, profile_dir=str(tmp_path / "file"))
    with pytest.raises(InvalidRequest, match="--profile-dir of the worker cannot be written to: File exists"):
        blocked.start_profile(1)
    blocked.close()
