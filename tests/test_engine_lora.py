"""Adapters in one batch: each request's tokens are those of transformers with its adapter merged into the weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.shared.errors import Conflict, InvalidRequest, NotFound, RequestError, Unavailable
from headrace.shared.messages import GenerateJob
from headrace.worker.engine.adapter import Adapter, Factors
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.lora import Adapters
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.stepper import STEP_ERRORS
from headrace.worker.reading import AtStart
from kit.adapters import ATTENTION, MLP, make, merge
from kit.engines import Generation, advance, drain, job, random_prompts, reference, run, tiny_engine
from kit.tiny_models import build
from safetensors.torch import load_file, save_file

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"targets": ATTENTION, "r": 4, "seed": 1},
    "everything": {"targets": ATTENTION + MLP, "r": 16, "alpha": 16, "seed": 2, "use_rslora": True, "std": 0.15},
    "patterns": {
        "targets": ("q_proj", "up_proj"),
        "r": 2,
        "seed": 3,
        "rank_pattern": {"layers.1.mlp.up_proj": 5},
        "alpha_pattern": {"layers.0.self_attn.q_proj": 20},
    },
}
PROMPTS = random_prompts([5, 13, 31, 8, 3, 17])


@dataclasses.dataclass(frozen=True)
class Folders:
    """A base model, its adapters, and the models that they merge to; "m" is the base itself."""

    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


def save(root: Path, architecture: str, adapters: dict[str, dict[str, Any]]) -> Folders:
    base = build(root / "base", architecture)
    folders = {name: make(root / name, base, **spec) for name, spec in adapters.items()}
    merged = {name: merge(root / f"{name}-merged", base, folder) for name, folder in folders.items()}
    return Folders(base, folders, merged | {"m": base})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return save(tmp_path_factory.mktemp("lora"), "llama", ADAPTERS)


def serving(folders: Folders, **settings: Any) -> TransformersEngine:
    engine = tiny_engine(folders.base, **settings)
    for name, folder in folders.adapters.items():
        engine.read_lora(name, str(folder))()
    return engine


def of(model: str, rid: str, prompt: list[int], **sampling: Any) -> GenerateJob:
    return dataclasses.replace(job(rid, prompt, **sampling), model=model)


def check(folders: Folders, model: str, prompt: list[int], generation: Generation) -> None:
    wanted, distributions = reference(folders.merged[model], prompt, len(generation.token_ids))
    assert generation.token_ids == wanted, model
    for row, logprob in zip(distributions, generation.logprobs, strict=True):
        assert logprob.logprob == pytest.approx(row.max().item(), abs=2e-3), model


def test_kernels_that_take_all_adapters_at_once_add_the_same(folders: Folders) -> None:
    """On a GPU; without one in Triton's interpreter. A chunk of one request is computed beside tokens of others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = serving(folders, device=device, attention_backend="triton")
    names, prompts = ("attention", "m", "everything"), (PROMPTS[0], PROMPTS[3], PROMPTS[4])
    pairs = list(zip(names, prompts, strict=True))
    done = run(
        engine, [of(name, name, prompt, top_logprobs=1, max_new_tokens=1 + (name == "m")) for name, prompt in pairs]
    )
    engine.drop_lora("attention")
    engine.add(of("patterns", "patterns", PROMPTS[4], top_logprobs=1, max_new_tokens=1))
    done |= drain(engine)
    for name, prompt in (*pairs, ("patterns", PROMPTS[4])):
        check(folders, name, prompt, done[name])
    engine.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_mixed_batch_is_each_adapters_own_model(folders: Folders, deterministic: bool) -> None:
    engine = serving(folders, deterministic=deterministic)
    names = [*folders.merged] * 2
    jobs = [
        of(name, f"{i}", PROMPTS[i % len(PROMPTS)], top_logprobs=1, max_new_tokens=10) for i, name in enumerate(names)
    ]
    done = run(engine, jobs)
    for i, name in enumerate(names):
        check(folders, name, PROMPTS[i % len(PROMPTS)], done[str(i)])
    assert len({tuple(reference(merged, PROMPTS[0], 8)[0]) for merged in folders.merged.values()}) == 4
    engine.close()


def test_what_runs_beside_a_request_changes_no_bit_of_it(folders: Folders) -> None:
    engine = serving(folders, deterministic=True, prefix_cache="off")
    wanted = of("everything", "a", PROMPTS[2], top_logprobs=3, max_new_tokens=6)
    (alone,) = run(engine, [wanted]).values()
    others = [of(name, name, PROMPTS[i], max_new_tokens=9) for i, name in enumerate(folders.merged)]
    beside = run(engine, [*others, wanted])["a"]
    assert (beside.token_ids, beside.logprobs) == (alone.token_ids, alone.logprobs)
    engine.close()


@pytest.mark.parametrize("architecture", ["gpt2", "phi3", "gemma2", "qwen3_moe"])
def test_other_architectures_take_adapters(architecture: str, tmp_path: Path) -> None:
    """Conv1D, linears that are merged in the model itself, norms around them, attention beside experts."""
    targets = {"gpt2": ("c_attn", "c_fc"), "phi3": ("qkv_proj", "gate_up_proj")}.get(architecture, ("q_proj", "o_proj"))
    folders = save(tmp_path, architecture, {"a": {"targets": targets, "std": 0.2}})
    engine = serving(folders)
    names = ["a", "m", "a", "m"]
    done = run(engine, [of(name, f"{i}", PROMPTS[i]) for i, name in enumerate(names)])
    for i, name in enumerate(names):
        assert done[str(i)].token_ids == reference(folders.merged[name], PROMPTS[i], 8)[0]
    engine.close()


def test_adapters_share_no_cached_prompts(folders: Folders) -> None:
    engine = serving(folders)
    prompt = random_prompts([40])[0]
    for attempt in range(2):
        for name in folders.merged:
            (generation,) = run(engine, [of(name, f"{name}-{attempt}", prompt)]).values()
            assert generation.token_ids == reference(folders.merged[name], prompt, 8)[0]
    hits = engine._scheduler.cache.hit_tokens
    assert hits >= 4 * 36  # the second time each found its own
    engine.close()


def test_another_worker_goes_on_with_the_adapter(folders: Folders) -> None:
    wanted = reference(folders.merged["everything"], PROMPTS[1], 12)[0]
    engine = serving(folders)
    engine.add(of("everything", "r", PROMPTS[1], max_new_tokens=12), wanted[:5])
    engine.add(of("m", "other", PROMPTS[1]))
    assert drain(engine)["r"].token_ids == wanted[5:]
    engine.close()


def test_what_runs_goes_on_with_an_adapter_that_is_dropped_or_replaced(folders: Folders) -> None:
    engine = serving(folders)
    old = {name: of(name, name, PROMPTS[2], max_new_tokens=12) for name in ("attention", "everything")}
    for one in old.values():
        engine.add(one)
    out: dict[str, Generation] = {}
    while len(out) < 2 or min(len(g.token_ids) for g in out.values()) < 3:
        advance(engine, out)
    engine.drop_lora("attention")
    engine.read_lora("everything", str(folders.adapters["patterns"]))()
    engine.drop_lora("patterns")
    engine.retract()  # also when all of it is computed again
    engine.add(of("everything", "new", PROMPTS[2], max_new_tokens=12))
    rest = drain(engine)
    for name in old:
        wanted = reference(folders.merged[name], PROMPTS[2], 12)[0]
        assert out[name].token_ids + rest[name].token_ids == wanted
    assert rest["new"].token_ids == reference(folders.merged["patterns"], PROMPTS[2], 12)[0]
    with pytest.raises(NotFound, match="'attention'"):
        engine.drop_lora("attention")
    engine.drop_lora("everything")
    (base,) = run(engine, [of("m", "base", PROMPTS[2])]).values()
    assert base.token_ids == reference(folders.base, PROMPTS[2], 8)[0]
    assert all(
        not module._forward_hooks for module in engine._stepper.runner._model.modules()
    )  # nothing is left to pay
    engine.close()


def test_adapters_stay_when_the_weights_are_updated(folders: Folders, tmp_path: Path) -> None:
    other = build(tmp_path / "other", "llama", seed=9)
    merged = merge(tmp_path / "merged", other, folders.adapters["attention"])
    engine = serving(folders)
    engine.read_weights(str(other), AtStart())("two")
    done = run(engine, [of("attention", "a", PROMPTS[0]), of("m", "b", PROMPTS[0])])
    assert done["a"].token_ids == reference(merged, PROMPTS[0], 8)[0]
    assert done["b"].token_ids == reference(other, PROMPTS[0], 8)[0]
    engine.close()


def test_no_more_than_the_limit_are_loaded(folders: Folders) -> None:
    engine = serving(folders, max_loras=3)
    folder = str(folders.adapters["attention"])
    with pytest.raises(Conflict, match="--max-loras of the worker is 3, and loaded are 'attention', 'everything'"):
        engine.read_lora("fourth", folder)
    assert engine.read_lora("patterns", folder)() == engine.loras()["attention"]  # the same content, by its id
    engine.drop_lora("attention")
    engine.read_lora("fourth", folder)()
    assert sorted(engine.loras()) == ["everything", "fourth", "patterns"]
    engine.close()


def _config(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def _tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return spoil


Q = "base_model.model.model.layers.0.self_attn.q_proj"
SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "adapter_config.json").unlink(), "it has no adapter_config.json"),
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json is not JSON"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "it has no adapter_model.safetensors"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 99), "cannot be read"),
    (_config(peft_type="IA3"), "peft_type is 'IA3'"),
    (_config(use_dora=True), "use_dora is 'True'"),
    (_config(modules_to_save=["lm_head"]), "modules_to_save is"),
    (_config(bias="all"), "bias is 'all'"),
    (_config(init_lora_weights="pissa"), "init_lora_weights is 'pissa'"),
    (_config(r=7), r"of rank 7 for this model they are \[7, 64\]"),
    (_config(r=0), "r of .* is 0"),
    (_config(lora_alpha="8"), "lora_alpha of .* is '8'"),
    (_config(rank_pattern={"(": 2}), r"rank_pattern holds '\(', which is no pattern"),
    (_config(alpha_pattern=["q_proj"]), "alpha_pattern is .*; it should be an object"),
    (_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "q_proj has lora_A alone"),
    (_tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 63)})), r"q_proj has factors \[4, 63\]"),
    (_tensors(lambda t: t[f"{Q}.lora_A.weight"].fill_(torch.nan)), "q_proj holds values that are not finite"),
    (_tensors(lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(4)})), "lora_magnitude_vector is no factor"),
    (
        _tensors(lambda t: t.update({Q.replace("q_proj", "qq") + ".lora_A.weight": torch.ones(4, 64)})),
        "qq is no linear of this model",
    ),
    (
        _tensors(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)})),
        "lm_head is no linear of this model that takes an adapter",
    ),
    (_tensors(lambda t: t.clear()), "holds no tensor"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILED, ids=[reason[:25] for _, reason in SPOILED])
def test_a_bad_adapter_is_refused_by_name(
    folders: Folders, tmp_path: Path, spoil: Callable[[Path], object], reason: str, engine: TransformersEngine
) -> None:
    folder = make(tmp_path / "bad", folders.base)
    spoil(folder)
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        engine.read_lora("bad", str(folder))
    assert refusal.value.param == "lora_path"
    assert engine.loras() == {}


def test_files_that_may_not_be_read_are_no_outage_of_redis(
    folders: Folders, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes an OSError for one, and would try the same job again for ever."""

    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(InvalidRequest, match="its files cannot be read: Permission denied"):
        engine.read_lora("attention", str(folders.adapters["attention"]))


def test_an_adapter_that_memory_has_no_room_for_is_refused_and_serving_goes_on(
    folders: Folders, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Factors:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Factors, "on", full)
    with pytest.raises(Unavailable, match="memory does not suffice for adapter 'big'") as refusal:
        engine.read_lora("big", str(folders.adapters["attention"]))
    assert isinstance(refusal.value, RequestError), "which is an answer to the request that asked for it"
    assert engine.loras() == {}
    assert run(engine, [job("a", PROMPTS[0])])["a"].finish is not None


def test_a_linear_that_sees_some_rows_fails_its_step_and_not_the_worker(folders: Folders) -> None:
    linear = torch.nn.Linear(64, 64, bias=False)
    adapters = Adapters(torch.nn.ModuleDict({"expert": linear}), limit=1, device=torch.device("cpu"))
    factors = Factors(torch.ones(2, 64), torch.ones(64, 2))
    adapters.add("a", adapter := Adapter("a", 2, {"expert": factors}))
    engine = serving(folders)
    piece = Slice(engine._intake.sequence(engine.card, job("r", [5, 6, 7]), ()), 0, 3)
    piece.sequence.adapter = adapter
    with adapters.over([piece]):
        assert bool(linear(torch.ones(1, 3, 64)).isfinite().all())
        with pytest.raises(STEP_ERRORS, match="does not see every row"):
            linear(torch.ones(1, 2, 64))
    engine.close()


@pytest.fixture(scope="module")
def engine(folders: Folders) -> TransformersEngine:
    return tiny_engine(folders.base)


def test_a_rank_above_the_setting_is_refused(folders: Folders, tmp_path: Path) -> None:
    engine = tiny_engine(folders.base, max_lora_rank=8)
    with pytest.raises(InvalidRequest, match="its rank is 16, and --max-lora-rank of the worker is 8"):
        engine.read_lora("everything", str(folders.adapters["everything"]))
    engine.close()
