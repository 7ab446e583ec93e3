"""Embeddings and classes equal those of transformers' own forward of each text alone, however texts are batched."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from headrace.shared.chunks import Finish
from headrace.shared.codec import decode_vector
from headrace.shared.errors import ContextLengthExceeded, EngineError, InvalidRequest, ModelRefused
from headrace.shared.messages import GenerateJob, Lane, Task
from headrace.worker.card import load_card
from headrace.worker.engine.encoder import EncoderEngine
from headrace.worker.settings import WorkerSettings
from kit import engines, tiny_encoders, tiny_models

PROMPTS = engines.random_prompts((7, 33, 20, 50, 3, 8, 7, 30, 31))
EMBEDDERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "mpnet",
    "modernbert",
    "nomic_bert",
    "qwen3",
    "gemma3_text",
)
CLASSIFIERS = ("bert", "roberta", "distilbert", "modernbert", "deberta-v2", "qwen3", "gemma2", "gpt2")
DECODERS = ("qwen3", "gemma3_text")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about heads that a checkpoint does not have


def job(rid: str, ids: Sequence[int], task: Task, lane: Lane = "std") -> GenerateJob:
    return replace(engines.job(rid, ids, lane=lane), task=task)


def engine_of(folder: Path, **settings: Any) -> EncoderEngine:
    settings.setdefault("context_length", 64)
    return EncoderEngine(WorkerSettings(model=f"m={folder}", device="cpu", **settings))


def drain(engine: EncoderEngine) -> list[tuple[str, Finish]]:
    out = []
    while engine.has_work():
        out += [(output.rid, output.finish) for output in engine.step() if output.finish is not None]
    engine.check_integrity()
    return out


def results(engine: EncoderEngine, prompts: Sequence[Sequence[int]], task: Task) -> list[torch.Tensor]:
    for number, ids in enumerate(prompts):
        engine.add(job(str(number), ids, task))
    found = {rid: finish.data for rid, finish in drain(engine)}
    return [torch.tensor(decode_vector(found[str(number)] or "").copy()) for number in range(len(prompts))]


@torch.inference_mode()
def expected(folder: Path, task: Task, of: Callable[[Any], torch.Tensor]) -> list[torch.Tensor]:
    auto: Any = transformers.AutoModel if task == "embed" else transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return [of(model(input_ids=torch.tensor([ids]))) for ids in PROMPTS]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


@pytest.mark.parametrize("architecture", EMBEDDERS)
def test_embeddings_equal_transformers(tmp_path: Path, architecture: str) -> None:
    folder = tiny_encoders.build(tmp_path / "m", architecture, "embed")
    engine = engine_of(folder, max_running=4)
    assert (engine.card.task, engine.card.dimensions) == ("embed", 64)
    last = architecture in DECODERS  # without files that say so: the mean for encoders, the last token for decoders
    wanted = expected(folder, "embed", lambda out: unit(out.last_hidden_state[0, -1] if last else out[0][0].mean(0)))
    for got, want in zip(results(engine, PROMPTS, "embed"), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_classes_equal_transformers(tmp_path: Path, architecture: str) -> None:
    folder = tiny_encoders.build(tmp_path / "m", architecture, "classify", id2label={0: "no", 1: "yes", 2: "perhaps"})
    engine = engine_of(folder, max_running=4)
    assert (engine.card.task, engine.card.labels) == ("classify", ("no", "yes", "perhaps"))
    wanted = expected(folder, "classify", lambda out: out.logits[0])
    for got, want in zip(results(engine, PROMPTS, "classify"), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_a_reward_model_has_one_number(tmp_path: Path) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "llama", "classify", num_labels=1)
    # Texts that end with the padding's id: transformers would score the token before it.
    (got,) = results(engine_of(folder), [[5, 6, 7, 0]], "classify")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model.model(torch.tensor([[5, 6, 7, 0]])).last_hidden_state
        torch.testing.assert_close(got, model.score(hidden)[0, -1], atol=1e-5, rtol=1e-5)
    assert got.shape == (1,)


@pytest.mark.parametrize(
    ("flag", "pool"),
    [
        ("pooling_mode_mean_tokens", lambda hidden: hidden.mean(0)),
        ("pooling_mode_cls_token", lambda hidden: hidden[0]),
        ("pooling_mode_lasttoken", lambda hidden: hidden[-1]),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_sentence_transformers_files_are_followed(
    tmp_path: Path, flag: str, pool: Callable[[torch.Tensor], torch.Tensor], normalize: bool
) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "bert", "embed")
    tiny_encoders.add_modules(folder, flag, normalize=normalize)
    wanted = expected(folder, "embed", lambda out: pool(out.last_hidden_state[0]))
    for got, want in zip(results(engine_of(folder), PROMPTS, "embed"), wanted, strict=True):
        torch.testing.assert_close(got, unit(want) if normalize else want, atol=2e-5, rtol=1e-5)


def test_dense_layers_and_settings_that_go_before_the_files(tmp_path: Path) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "bert", "embed")
    tiny_encoders.add_modules(folder, "pooling_mode_mean_tokens", dense=(64, 24))
    engine = engine_of(folder)
    assert engine.card.dimensions == 24
    weights = dict(engine._model._pooler.layers[0].named_parameters())  # type: ignore[union-attr]

    def dense(out: Any) -> torch.Tensor:
        return torch.tanh(weights["weight"] @ out.last_hidden_state[0].mean(0) + weights["bias"])

    for got, want in zip(results(engine, PROMPTS, "embed"), expected(folder, "embed", dense), strict=True):
        torch.testing.assert_close(got, unit(want), atol=1e-5, rtol=0)
    other = engine_of(folder, pooling="cls", normalize="no")
    assert other._model._pooler is not None
    assert (other._model._pooler.pooling, other._model._pooler.normalize) == ("cls", False)


def test_lanes_and_ages_go_first_and_texts_of_a_step_are_of_a_length(tmp_path: Path) -> None:
    engine = engine_of(tiny_encoders.build(tmp_path / "m", "bert", "embed"), max_running=4, max_batch_tokens=64)
    for number, (length, lane) in enumerate(
        [(10, "batch"), (30, "std"), (31, "std"), (8, "rt"), (29, "std"), (9, "rt")]
    ):
        engine.add(job(str(number), [5] * length, "embed", lane))  # type: ignore[arg-type]
    steps = []
    while engine.has_work():
        steps.append(sorted(output.rid for output in engine.step()))
    assert steps == [["0", "3", "5"], ["1", "2"], ["4"]]  # 3 * 31 tokens would be over the budget


def test_deterministic_mode_computes_each_text_alone(tmp_path: Path) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "bert", "embed")
    engine = engine_of(folder, deterministic=True)
    together = results(engine, PROMPTS, "embed")
    for ids, vector in zip(PROMPTS, together, strict=True):
        assert torch.equal(results(engine, [ids], "embed")[0], vector)


def test_what_cannot_run_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    engine = engine_of(tiny_encoders.build(tmp_path / "m", "bert", "embed"))
    good = [5, 6, 7]
    engine.add(job("good", good, "embed"))
    with pytest.raises(InvalidRequest, match="served to embed, not to generate"):
        engine.add(engines.job("g", good))
    with pytest.raises(InvalidRequest, match="not to classify"):
        engine.add(job("c", good, "classify"))
    with pytest.raises(ContextLengthExceeded, match="65 tokens; this model reads 64"):
        engine.add(job("long", [5] * 65, "embed"))
    with pytest.raises(InvalidRequest, match="token id 320 is not in the vocabulary of 320"):
        engine.add(job("id", [320], "embed"))
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add(job("none", [], "embed"))
    with pytest.raises(EngineError, match="running already"):
        engine.add(job("good", good, "embed"))
    engine.add(job("gone", good, "embed"))
    engine.abort("gone")
    assert [rid for rid, _ in drain(engine)] == ["good"]


def test_a_step_that_fails_is_tried_in_halves_so_that_only_the_guilty_text_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(tiny_encoders.build(tmp_path / "m", "bert", "embed"))
    run = engine._model.run

    def poisoned(texts: Sequence[Sequence[int]]) -> torch.Tensor:
        if any(9 in ids for ids in texts):
            raise RuntimeError("poison")
        rows = run(texts)
        return torch.full_like(rows, torch.nan) if any(8 in ids for ids in texts) and len(texts) == 1 else rows

    monkeypatch.setattr(engine._model, "run", poisoned)
    for number, ids in enumerate([[5, 6], [5, 9], [5, 7], [6, 7]]):
        engine.add(job(str(number), ids, "embed"))
    assert {rid: finish.type for rid, finish in drain(engine)} == {"0": "stop", "1": "error", "2": "stop", "3": "stop"}
    engine.add(job("nan", [8], "embed"))
    assert [finish.type for _, finish in drain(engine)] == ["error"]


def test_cards_say_what_a_folder_is_for(tmp_path: Path) -> None:
    embedder = tiny_encoders.build(tmp_path / "embedder", "roberta", "embed")
    assert load_card(WorkerSettings(model=str(embedder)))[0].task == "embed"
    # Positions begin after the padding's: of 256, those of ids 0 (its own) and before are lost.
    assert load_card(WorkerSettings(model=str(embedder)))[0].context_length == tiny_models.CONTEXT_LENGTH - 1
    (embedder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    assert load_card(WorkerSettings(model=str(embedder)))[0].context_length == 100
    assert load_card(WorkerSettings(model=str(embedder), context_length=200))[0].context_length == 200
    classifier = tiny_encoders.build(
        tmp_path / "classifier", "bert", "classify", problem_type="multi_label_classification"
    )
    card = load_card(WorkerSettings(model=str(classifier)))[0]
    assert (card.task, card.multi_label) == ("classify", True)
    generator = tiny_models.build(tmp_path / "generator")
    assert load_card(WorkerSettings(model=str(generator)))[0].task == "generate"
    assert load_card(WorkerSettings(model=str(generator), task="embed"))[0].task == "embed"
    tiny_encoders.add_modules(generator, "pooling_mode_lasttoken")  # as Qwen3-Embedding's folder
    assert load_card(WorkerSettings(model=str(generator)))[0].task == "embed"


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (
            {"1_Pooling/config.json": {"pooling_mode_max_tokens": True}},
            r"pooling is pooling_mode_max_tokens.*--pooling",
        ),
        ({"1_Pooling/config.json": None}, r"1_Pooling/config.json cannot be read"),
        ({"modules.json": [{"type": "x.LSTM", "path": ""}]}, r"modules.json names a LSTM"),
        (
            {"config.json": {"model_type": "t5", "vocab_size": 320, "d_model": 64}},
            r"encoder-decoder|weights are missing",
        ),
    ],
)
def test_folders_that_are_not_understood_are_refused(tmp_path: Path, break_it: dict[str, Any], says: str) -> None:
    folder = tiny_encoders.build(tmp_path / "m", "bert", "embed")
    tiny_encoders.add_modules(folder, "pooling_mode_mean_tokens")
    for name, content in break_it.items():
        (folder / name).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(ModelRefused, match=says):
        engine_of(folder)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    import safetensors.torch

    folder = tiny_encoders.build(tmp_path / "m", "bert", "embed")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"1 weights are missing, such as encoder.layer.1.output.dense.weight"):
        engine_of(folder)
