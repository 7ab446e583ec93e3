"""What goes wrong in a step hurts the sequences concerned and nobody else; ends, limits and refusals of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from headrace.shared.errors import ContextLengthExceeded, EngineError, InvalidRequest
from headrace.shared.messages import GenerateJob
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.runner import ModelRunner
from kit import engines, tiny_models

POISON = 300  # a token id whose embedding is NaN in the poisoned model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder)
    yield engine
    engine.check_integrity()
    engine.close()


def test_nan_ends_its_own_sequence_and_leaves_no_trace_in_the_pool(folder: Path, tmp_path: Path) -> None:
    poisoned = tiny_models.build(tmp_path / "m")
    weights = safetensors.torch.load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    safetensors.torch.save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine = engines.tiny_engine(poisoned, context_length=64, kv_memory="40kb")  # so small that blocks are used again
    prompts = engines.random_prompts((9, 14))
    clean = [engines.reference(folder, prompt, 8)[0] for prompt in prompts]
    for turn in range(3):
        jobs = [engines.job(f"{turn} {i}", prompt) for i, prompt in enumerate(prompts)]
        bad = engines.job(f"{turn} bad", [POISON, *range(5, 40)])  # two chunks: NaN is stored before it is seen
        out = engines.run(engine, [jobs[0], bad, jobs[1]])
        finish = out[bad.rid].finish
        assert finish is not None
        assert finish.type == "error"
        assert [out[one.rid].token_ids for one in jobs] == clean
    engine.add(engines.job("aborted", [POISON, *range(5, 60)]))
    engine.step()
    engine.abort("aborted")
    assert [engines.run(engine, [engines.job("a", prompt)])["a"].token_ids for prompt in prompts] == clean


def test_nan_behind_a_sliding_window_is_found_and_leaves_no_trace(tmp_path: Path) -> None:
    """The last token of a prompt sees nothing of its first ones: its logits are finite, their K/V are not."""
    clean, poisoned = (tiny_models.build(tmp_path / name, "mistral") for name in ("clean", "poisoned"))
    weights = safetensors.torch.load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    safetensors.torch.save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    prompts = engines.random_prompts((9, 14, 50))
    expected = [engines.reference(clean, prompt, 8)[0] for prompt in prompts]
    small: dict[str, Any] = {"context_length": 96, "kv_memory": "160kb"}
    for settings in (
        {"attention_backend": "auto", "block_size": 16},
        {"attention_backend": "torch", "block_size": 4},
        {"max_batch_tokens": 1, "max_running": 1},  # chunks of one token
    ):
        engine = engines.tiny_engine(poisoned, **(small | settings))
        for turn in range(4):
            bad = engines.job(f"bad {turn}", [POISON, *range(5, 75)])  # three windows, and chunks
            out = engines.run(engine, [bad, *(engines.job(str(n), prompt) for n, prompt in enumerate(prompts))])
            finish = out[bad.rid].finish
            assert finish is not None
            assert finish.type == "error"
            assert not out[bad.rid].cached_tokens
            assert [out[str(n)].token_ids for n in range(len(prompts))] == expected
        engine.close()


def test_an_exception_in_a_step_is_charged_to_the_guilty(
    folder: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ModelRunner.run

    def fails_for_bad(self: ModelRunner, slices: list[Slice]) -> Any:
        if any(piece.sequence.rid == "bad" for piece in slices):
            raise RuntimeError("device-side assert")
        return forward(self, slices)

    monkeypatch.setattr(ModelRunner, "run", fails_for_bad)
    prompts = engines.random_prompts((4, 5, 6))
    out = engines.run(engine, [engines.job(rid, p) for rid, p in zip(("a", "bad", "b"), prompts, strict=True)])
    assert out["bad"].finish is not None
    assert out["bad"].finish.type == "error"
    assert "device-side" not in (out["bad"].finish.message or ""), "a client reads this"
    for rid, prompt in (("a", prompts[0]), ("b", prompts[2])):
        assert out[rid].token_ids == engines.reference(folder, prompt, 8)[0]


def test_a_device_that_is_full_is_not_lost(
    folder: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory costs the sequence that asked for it, though not one byte is free to ask the device with."""
    forward, ones = ModelRunner.run, torch.ones

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def fails_for_bad(self: ModelRunner, slices: list[Slice]) -> Any:
        bad = any(piece.sequence.rid == "bad" for piece in slices)
        monkeypatch.setattr(torch, "ones", full if bad else ones)
        return full() if bad else forward(self, slices)

    monkeypatch.setattr(ModelRunner, "run", fails_for_bad)
    prompts = engines.random_prompts((4, 5))
    out = engines.run(engine, [engines.job("bad", prompts[0]), engines.job("a", prompts[1])])
    assert out["bad"].finish is not None
    assert out["bad"].finish.type == "error"
    assert out["a"].token_ids == engines.reference(folder, prompts[1], 8)[0]


def test_a_device_that_computes_nothing_more_ends_the_process(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.add(engines.job("a", range(5, 9)))
    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "run", broken)
        patched.setattr(torch, "ones", broken)
        with pytest.raises(EngineError, match="cpu is lost"):
            engine.step()
    engine.abort("a")


def test_blocks_that_could_not_be_cleared_are_cleared_before_the_next_forward(
    folder: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, fails = ModelRunner.zero, iter([True, True])

    def full_at_first(self: ModelRunner, blocks: list[int]) -> None:
        if next(fails, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        zero(self, blocks)

    engine.add(engines.job("aborted", range(5, 40)))
    engine.step()
    engine.abort("aborted")
    dirty = engine._scheduler.blocks.dirty
    assert dirty
    monkeypatch.setattr(ModelRunner, "zero", full_at_first)
    prompts = engines.random_prompts((4, 5))
    out = engines.run(engine, [engines.job(str(i), prompt, max_new_tokens=3) for i, prompt in enumerate(prompts)])
    failed = [rid for rid, each in out.items() if each.finish is not None and each.finish.type == "error"]
    assert failed == ["0"], "the first half, which is tried again while memory is full"
    assert out["1"].token_ids == engines.reference(folder, prompts[1], 3)[0]
    assert not dirty


def test_abort_frees_at_once_and_knows_no_strangers(engine: TransformersEngine) -> None:
    engine.add(engines.job("a", range(5, 40)))
    engine.add(engines.job("b", range(5, 9)))
    engine.step()
    engine.step()
    assert set(engine.running()) == {"a", "b"}
    slots = engine.free_slots()
    engine.abort("a")
    engine.abort("nobody")
    engine.check_integrity()
    assert engine.running() == ["b"]
    assert engine.free_slots() == slots + 1
    assert set(engines.drain(engine)) == {"b"}
    assert not engine.has_work()


def test_prefill_answers_each_step_so_that_leases_are_renewed(engine: TransformersEngine) -> None:
    out = engines.run(engine, [engines.job("a", range(5, 105), max_new_tokens=2)])["a"]
    assert out.steps == 5 + 1  # 100 tokens at 24 a step; the last chunk brings the first token


def test_ends(folder: Path, engine: TransformersEngine) -> None:
    (prompt,) = engines.random_prompts((8,))
    tokens, _ = engines.reference(folder, prompt, 8)
    stop = next(token for token in tokens if token != tokens[0])
    at = tokens.index(stop)
    stopped = engines.run(engine, [engines.job("a", prompt, stop_token_ids=(stop,))])["a"]
    assert stopped.token_ids == tokens[: at + 1]
    assert stopped.finish is not None
    assert (stopped.finish.type, stopped.finish.matched) == ("stop", stop)
    later = engines.run(engine, [engines.job("a", prompt, stop_token_ids=(stop,), min_new_tokens=at + 1)])["a"]
    assert stop not in later.token_ids[: at + 1]
    long = engines.run(engine, [engines.job("a", prompt, max_new_tokens=None)])["a"]
    assert len(long.token_ids) == engine.card.context_length - len(prompt)
    assert long.finish is not None
    assert long.finish.type == "length"


def test_eos_of_the_model_ends_unless_ignored(engine: TransformersEngine) -> None:
    bias: dict[str, Any] = {"logit_bias": ((tiny_models.EOS_ID, 100.0),)}
    heeded = engines.run(engine, [engines.job("a", range(5, 9), ignore_eos=False, **bias)])["a"]
    assert heeded.token_ids == [tiny_models.EOS_ID]
    assert heeded.finish is not None
    assert heeded.finish.matched == tiny_models.EOS_ID
    ignored = engines.run(engine, [engines.job("a", range(5, 9), max_new_tokens=3, **bias)])["a"]
    assert ignored.token_ids == [tiny_models.EOS_ID] * 3


@pytest.mark.parametrize(
    ("produced", "sampling", "kind"),
    [
        ((9, 8), {"max_new_tokens": 2}, "length"),
        ((9, 8), {"stop_token_ids": (8,)}, "stop"),
        ((), {"max_new_tokens": 0}, "length"),
    ],
)
def test_a_job_with_nothing_left_to_do_ends_without_a_token(
    engine: TransformersEngine, produced: tuple[int, ...], sampling: dict[str, Any], kind: str
) -> None:
    engine.add(engines.job("a", range(5, 9), **sampling), produced)
    assert engine.has_work()
    out = engines.drain(engine)["a"]
    assert out.token_ids == []
    assert out.finish is not None
    assert out.finish.type == kind


def test_sampled_output_goes_on_with_the_same_noise(engine: TransformersEngine) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": 12, "frequency_penalty": 0.5}
    seeded = engines.job("a", range(5, 14), sampling_seed=77, **sampling)
    whole = engines.run(engine, [seeded])["a"].token_ids
    other = engines.run(engine, [engines.job("a", range(5, 14), sampling_seed=78, **sampling)])["a"].token_ids
    assert whole != other
    noise = [engines.job(f"n{i}", prompt, **sampling) for i, prompt in enumerate(engines.random_prompts((3, 40, 12)))]
    for cut in (1, 5, 11):
        for one in noise:
            engine.add(one)
        engine.add(seeded, whole[:cut])
        assert whole[:cut] + engines.drain(engine)["a"].token_ids == whole


@pytest.mark.parametrize(
    ("job", "error", "says"),
    [
        (engines.job("a", ()), InvalidRequest, "empty"),
        (engines.job("a", (5, 320)), InvalidRequest, "token id 320 is not in the vocabulary of 320"),
        (engines.job("a", (5, -1)), InvalidRequest, "token id -1"),
        (engines.job("a", (5,), logit_bias=((320, 1.0),)), InvalidRequest, "token id 320"),
        (engines.job("a", (5,), bad_words=((5, 999),)), InvalidRequest, "token id 999"),
        (engines.job("a", [5] * 256), ContextLengthExceeded, "256 tokens and leaves no room"),
    ],
)
def test_jobs_that_can_never_run_are_refused(
    engine: TransformersEngine, job: GenerateJob, error: type[InvalidRequest], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        engine.add(job)
    assert raised.value.param is not None
    assert not engine.has_work()


def test_stop_ids_outside_the_vocabulary_are_harmless(engine: TransformersEngine) -> None:
    job = engines.job("a", range(5, 9), stop_token_ids=(-1, 320, 1 << 40), min_new_tokens=2, max_new_tokens=4)
    assert len(engines.run(engine, [job])["a"].token_ids) == 4


def test_no_slot_is_free_while_something_waits_for_room(engine: TransformersEngine) -> None:
    assert engine.free_slots() == 8
    for rid in "abc":
        engine.add(engines.job(rid, range(5, 55)))
    assert engine.free_slots() == 5
    engine.step()
    assert engine.free_slots() == 0
    engines.drain(engine)
    assert engine.free_slots() == 8


def test_a_request_cannot_run_twice(engine: TransformersEngine) -> None:
    engine.add(engines.job("a", (5,)))
    with pytest.raises(EngineError, match="running already"):
        engine.add(engines.job("a", (5,)))


def test_deterministic_bytes_do_not_depend_on_neighbours_or_on_a_takeover(folder: Path) -> None:
    engine = engines.tiny_engine(folder, deterministic=True)
    whole = engine.card.vocab_size
    watched = engines.job("w", range(5, 60), max_new_tokens=6, top_logprobs=whole)
    alone = engines.run(engine, [watched])["w"]
    others = [engines.job(f"o{i}", prompt) for i, prompt in enumerate(engines.random_prompts((3, 40, 11, 26)))]
    assert engines.run(engine, [*others, watched])["w"].logprobs == alone.logprobs
    engine.add(watched, alone.token_ids[:3])
    assert engines.drain(engine)["w"].logprobs == alone.logprobs[3:]
