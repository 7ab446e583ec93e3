"""Other weights for a model that serves: tokens are the new model's; what does not fit leaves the old ones serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from headrace.shared.errors import InvalidRequest
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.reading import AtStart
from kit.engines import Generation, advance, drain, job, random_prompts, reference, run, tiny_engine
from kit.tiny_models import build
from safetensors.torch import load_file, save_file

PROMPTS = random_prompts([7, 19, 3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one shape, in two kinds: with tied embeddings and without."""
    root = tmp_path_factory.mktemp("weights")
    return {
        f"{kind}-{seed}": build(root / f"{kind}-{seed}", "llama", seed=seed, tie_word_embeddings=kind == "tied")
        for kind in ("tied", "untied")
        for seed in (0, 1)
    }


def greedy(engine: TransformersEngine, tag: str = "") -> list[list[int]]:
    done = run(engine, [job(f"{tag}{i}", prompt) for i, prompt in enumerate(PROMPTS)])
    return [done[f"{tag}{i}"].token_ids for i in range(len(PROMPTS))]


def expected(folder: Path) -> list[list[int]]:
    return [reference(folder, prompt, 8)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_the_new_weights_serve_and_the_old_ones_again(folders: dict[str, Path], kind: str) -> None:
    old, new = folders[f"{kind}-0"], folders[f"{kind}-1"]
    engine = tiny_engine(old)
    assert greedy(engine) == expected(old) != expected(new)
    engine.read_weights(str(new), AtStart())("two")
    assert engine.card.weight_version == "two"
    assert greedy(engine) == expected(new)
    engine.read_weights(str(old), AtStart())("one")
    assert greedy(engine) == expected(old)
    engine.close()


def test_what_runs_goes_on_with_the_new_weights(folders: dict[str, Path]) -> None:
    """Retracted, its K/V is computed anew, so that the rest is what the new model says after prompt and output."""
    old, new = folders["untied-0"], folders["untied-1"]
    engine = tiny_engine(old)
    for i, prompt in enumerate(PROMPTS):
        engine.add(job(str(i), prompt, max_new_tokens=12))
    out: dict[str, Generation] = {}
    while min(len(out[str(i)].token_ids) if str(i) in out else 0 for i in range(3)) < 4:
        advance(engine, out)
    before = [list(out[str(i)].token_ids) for i in range(3)]
    use = engine.read_weights(str(new), AtStart())
    engine.retract()
    use("two")
    rest = drain(engine)
    for i, prompt in enumerate(PROMPTS):
        assert before[i] == reference(old, prompt, 12)[0][: len(before[i])]
        assert rest[str(i)].token_ids == reference(new, [*prompt, *before[i]], 12 - len(before[i]))[0]
    engine.close()


def test_reading_alone_changes_nothing(folders: dict[str, Path]) -> None:
    engine = tiny_engine(folders["untied-0"])
    engine.read_weights(str(folders["untied-1"]), AtStart())
    assert greedy(engine) == expected(folders["untied-0"])
    engine.close()


def _other_shape(folder: Path) -> str:
    build(folder, "llama", seed=1, hidden_size=32)
    return "hidden_size is 32, the model that serves has 64"


def _other_architecture(folder: Path) -> str:
    build(folder, "qwen3", seed=1)
    return "another model's"


def _no_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "cannot be read"


def _cut_short(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])
    return "cannot be read"


def _one_missing(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "weights are missing, such as model.layers.1.mlp.up_proj.weight"


def _wrong_shape(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "model.norm.weight is [63], by config.json it should be [64]"


def _not_finite(folder: Path) -> str:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return "not finite"


def _no_configuration(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is not understood"


def _broken_configuration(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-thing"}))
    return "config.json is not understood"


@pytest.mark.parametrize(
    "spoil",
    [
        *(_other_shape, _other_architecture, _no_weights, _cut_short, _one_missing, _wrong_shape, _not_finite),
        *(_no_configuration, _broken_configuration),
    ],
)
def test_what_does_not_fit_is_refused_and_the_old_weights_serve(
    folders: dict[str, Path], tmp_path: Path, spoil: object
) -> None:
    folder = tmp_path / "new"
    shutil.copytree(folders["untied-1"], folder)
    assert callable(spoil)
    reason = str(spoil(folder))
    engine = tiny_engine(folders["untied-0"])
    with pytest.raises(InvalidRequest) as refusal:
        engine.read_weights(str(folder), AtStart())
    assert reason in refusal.value.message
    assert "--model" not in refusal.value.message
    assert refusal.value.param == "model_path"
    assert engine.card.weight_version == "default"
    assert greedy(engine) == expected(folders["untied-0"])
    engine.close()


def test_a_folder_that_is_not_there_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = tiny_engine(folders["untied-0"])
    with pytest.raises(InvalidRequest, match="sees no folder"):
        engine.read_weights(str(tmp_path / "gone"), AtStart())
    engine.close()
