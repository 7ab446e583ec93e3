"""Weights written over those that serve: what a fresh start would answer, no second model, and a way back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from headrace.shared.errors import Conflict, EngineError
from headrace.worker.engine import checkpoint
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.loader import LoadedModel
from headrace.worker.reading import AtStart
from kit.allocations import Allocations
from kit.engines import Generation, job, random_prompts, run, tiny_engine
from kit.tiny_models import build
from safetensors.torch import load_file, save_file

PROMPTS = random_prompts([7, 19, 3])


def answers(engine: TransformersEngine) -> list[tuple[list[int], Any]]:
    """Tokens and log-probabilities, which are the same bit for bit where the weights are."""
    done: dict[str, Generation] = run(engine, [job(str(i), p, top_logprobs=5) for i, p in enumerate(PROMPTS)])
    engine.flush_cache()
    return [(done[str(i)].token_ids, done[str(i)].logprobs) for i in range(len(PROMPTS))]


def fresh(folder: Path, **settings: Any) -> list[tuple[list[int], Any]]:
    engine = tiny_engine(folder, **settings)
    try:
        return answers(engine)
    finally:
        engine.close()


def round_to_bfloat16(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.bfloat16() for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


def loads(engine: TransformersEngine) -> list[Path]:
    """Folders from which another model is loaded from now on."""
    asked: list[Path] = []
    load = engine._weights._load

    def noted(folder: Path) -> LoadedModel:
        asked.append(folder)
        return load(folder)

    engine._weights._load = noted
    return asked


class Refusing(AtStart):
    """A loop that never stands still."""

    def rest(self) -> None:
        raise AssertionError("the steps had to wait")


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_answers_are_those_of_a_fresh_start(architecture: str, stored: str, tmp_path: Path) -> None:
    old, new = (build(tmp_path / f"v{seed}", architecture, seed=seed) for seed in (0, 1))
    if stored == "bfloat16":
        round_to_bfloat16(old)
        round_to_bfloat16(new)
    engine = tiny_engine(old)
    asked, before = loads(engine), answers(engine)
    engine.read_weights(str(new), Refusing())("two")
    assert answers(engine) == fresh(new) != before
    engine.read_weights(str(old), Refusing())("one")
    assert answers(engine) == before
    assert asked == []
    engine.close()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("gpt2", {}), ("qwen3_moe", {}), ("llama", {"weight_dtype": "int8"})],
    ids=["transposed", "experts", "int8"],
)
def test_where_there_is_no_map_a_second_model_takes_the_place(
    architecture: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    old, new = (build(tmp_path / f"v{seed}", architecture, seed=seed) for seed in (0, 1))
    engine = tiny_engine(old, **settings)
    asked = loads(engine)
    engine.read_weights(str(new), AtStart())("two")
    assert answers(engine) == fresh(new, **settings)
    assert asked == [new]
    engine.close()


def test_what_panels_would_round_is_loaded_beside(tmp_path: Path) -> None:
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    round_to_bfloat16(old)
    engine = tiny_engine(old)
    asked = loads(engine)
    engine.read_weights(str(new), AtStart())("two")
    assert answers(engine) == fresh(new)
    assert asked == [new]
    engine.close()


def test_a_map_that_is_wrong_is_not_used(tmp_path: Path) -> None:
    """Two tensors of one shape that changed places in the model, as a rewrite of another release could do."""
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    engine = tiny_engine(old)
    place = engine._weights._in_place
    assert place is not None
    first, second = (f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1))
    place._cells[first], place._cells[second] = place._cells[second], place._cells[first]
    asked = loads(engine)
    engine.read_weights(str(new), AtStart())("two")
    assert answers(engine) == fresh(new)
    assert asked == [new]
    engine.close()


def test_memory_for_some_rows_is_all_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed, **shape) for seed in (0, 1))
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 16 << 10)
    engine = tiny_engine(old)
    with Allocations() as seen:
        engine.read_weights(str(new), AtStart())("two")
    assert 0 < seen.peak <= 8 * checkpoint.CHUNK_BYTES  # what docs/architecture.md says
    assert seen.peak < (new / "model.safetensors").stat().st_size / 20
    assert answers(engine) == fresh(new)
    engine.close()


def test_files_that_shrink_after_the_check_leave_the_old_weights_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    engine = tiny_engine(old)
    before = answers(engine)
    use = engine.read_weights(str(new), AtStart())
    os.truncate(new / "model.safetensors", (new / "model.safetensors").stat().st_size // 2)
    with pytest.raises(EngineError, match=r"has changed since it was checked.*the old weights serve on"):
        use("two")
    assert engine.card.weight_version == "default"
    assert answers(engine) == before
    engine.close()


def test_a_folder_may_go_once_it_was_read(tmp_path: Path) -> None:
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    wanted = fresh(new)
    engine = tiny_engine(old)
    use = engine.read_weights(str(new), AtStart())
    shutil.rmtree(new)
    use("two")
    assert answers(engine) == wanted
    engine.close()


def test_a_reading_that_is_given_up_ends_and_changes_nothing(tmp_path: Path) -> None:
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    engine = tiny_engine(old)
    before = answers(engine)

    class Impatient(AtStart):
        checks = 0

        def check(self) -> None:
            self.checks += 1
            if self.checks == 5:
                with pytest.raises(Conflict, match="still being read"):
                    engine.read_weights(str(new), AtStart())
                raise EngineError("given up")

    with pytest.raises(EngineError, match="given up"):
        engine.read_weights(str(new), Impatient())
    assert answers(engine) == before
    engine.read_weights(str(new), AtStart())("two")
    assert answers(engine) == fresh(new)
    engine.close()


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    old, new = (build(tmp_path / f"v{seed}", "llama", seed=seed) for seed in (0, 1))
    wanted = fresh(new)
    tensors = load_file(new / "model.safetensors")
    halves = [dict(list(tensors.items())[n::2]) for n in range(2)]
    names = [f"model-{n}.safetensors" for n in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, new / name, metadata={"format": "pt"})
    (new / "model.safetensors").unlink()
    index = {
        "metadata": {},
        "weight_map": {key: name for name, half in zip(names, halves, strict=True) for key in half},
    }
    (new / "model.safetensors.index.json").write_bytes(json.dumps(index).encode())
    engine = tiny_engine(old)
    engine.read_weights(str(new), Refusing())("two")
    assert answers(engine) == wanted
    engine.close()
