"""The GPU's path of the engine: attention, sampling and graphs over fixed buffers give transformers' own tokens.

Without a GPU the kernels run in Triton's interpreter, and a graph is its step done again on the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("triton")

from headrace.worker.engine import build as build_module
from headrace.worker.engine.attention_triton import num_splits
from headrace.worker.engine.cuda_graphs import buckets
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.graph_buffers import Buffers, BufferWriter
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.stepper import Stepper
from kit import engines, tiny_models
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUT = 3
# And how many of their layers are fused.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "grouped heads of 32": ("llama", {"head_dim": 32, "num_hidden_layers": 1}, 1),
    "heads of 80": ("qwen3", {"head_dim": 80, "num_hidden_layers": 1}, 1),
    "windows and softcap": ("gemma2", {}, 2),
    "windows and sinks": ("gpt_oss", {}, 0),
}


def triton_engine(folder: Path, **settings: Any) -> TransformersEngine:
    return engines.tiny_engine(folder, **({"device": DEVICE, "attention_backend": "triton"} | settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_over_mixed_batches(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    architecture, config, fused = MODELS[name]
    caplog.set_level("INFO")
    folder = tiny_models.build(tmp_path / "m", architecture, **config)
    engine = triton_engine(folder)
    assert (f"{fused} layers fused" in caplog.text) == bool(fused)
    prompts = engines.random_prompts((5, 30, 9))  # 24 tokens a step: chunks share steps with sequences that decode
    out = engines.run(engine, [engines.job(str(i), p, max_new_tokens=OUTPUT) for i, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert out[str(number)].token_ids == engines.reference(folder, prompt, OUTPUT)[0]
    engine.close()


class Repeating:
    """A capture that does the step again, and counts."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1
        step()  # as recording does

        def replay() -> None:
            self.replayed += 1
            step()

        return replay


@pytest.fixture
def repeating(monkeypatch: pytest.MonkeyPatch) -> Repeating:
    capture = Repeating()
    if DEVICE == "cpu":
        monkeypatch.setattr(build_module, "capture_for", lambda device: capture)
    return capture


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_graphs_give_the_tokens_of_the_reference(folder: Path, repeating: Repeating, overlap: str) -> None:
    """Steps of 3 rows go through the graph of 4, with one of padding; as sequences end, through those of 2 and 1."""
    engine = triton_engine(folder, max_running=4, overlap=overlap)
    prompts, outputs = engines.random_prompts((4, 9, 6)), (2, 3, 5)
    jobs = [engines.job(str(i), p, max_new_tokens=n) for i, (p, n) in enumerate(zip(prompts, outputs, strict=True))]
    out = engines.run(engine, jobs)
    for number, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
        assert out[str(number)].token_ids == engines.reference(folder, prompt, count)[0]
    if DEVICE == "cpu":
        assert repeating.captured == 3  # 1, 2, 4
        assert repeating.replayed == 4
    engine.close()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_draws_within_graphs_are_those_without(folder: Path, repeating: Repeating, overlap: str) -> None:
    prompts = engines.random_prompts((4, 9, 6))
    asked: list[dict[str, Any]] = [
        {"temperature": 0.8, "sampling_seed": 1},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.01, "sampling_seed": 2},
        {"temperature": 1.2, "repetition_penalty": 1.3, "sampling_seed": 3},  # not plain: drawn by the host
    ]
    jobs = [engines.job(str(i), p, max_new_tokens=3, **s) for i, (p, s) in enumerate(zip(prompts, asked, strict=True))]
    host = engines.tiny_engine(folder, device=DEVICE, attention_backend="torch")
    wanted = engines.run(host, jobs)
    engine = triton_engine(folder, max_running=3, overlap=overlap)
    for chosen in (jobs, jobs[:2]):
        out = engines.run(engine, chosen)
        assert {rid: each.token_ids for rid, each in out.items()} == {j.rid: wanted[j.rid].token_ids for j in chosen}
    engine.close()
    host.close()


def test_a_prompts_last_token_tells_of_nan_that_it_does_not_see(tmp_path: Path, repeating: Repeating) -> None:
    """Its chunk of one token would fit a graph, where nothing is added to logits."""
    folder = tiny_models.build(tmp_path, "mistral", head_dim=32, num_hidden_layers=1)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][300] = torch.nan
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = triton_engine(folder, max_running=1)  # 24 tokens a step
    (prompt,) = engines.random_prompts((3 * 24,), high=200)
    out = engines.run(engine, [engines.job("bad", [300, *prompt])])
    assert out["bad"].finish is not None
    assert out["bad"].finish.type == "error"


class NoReading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails where a tensor's numbers are asked for: on a GPU that waits for all that it was given."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


def test_what_is_launched_ahead_waits_for_nothing(
    folder: Path, repeating: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, launched = Stepper.launch, list[int]()

    def watched(self: Stepper, slices: list[Slice], after: Any) -> Any:
        launched.append(len(slices))
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            with NoReading(), monkeypatch.context() as patched:  # type: ignore[no-untyped-call]
                patched.setattr(torch.Tensor, "tolist", torch.Tensor.item)
                return launch(self, slices, after)
        finally:
            if DEVICE == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    prompts = engines.random_prompts((4, 9, 30))
    jobs = [engines.job(str(i), p, max_new_tokens=4, temperature=i / 2) for i, p in enumerate(prompts)]
    engine = triton_engine(folder, max_running=4, overlap="on")
    expected = engines.run(engine, jobs)
    monkeypatch.setattr(Stepper, "launch", watched)
    engine.flush_cache()
    out = engines.run(engine, jobs)
    assert {rid: each.token_ids for rid, each in out.items()} == {rid: each.token_ids for rid, each in expected.items()}
    assert launched == [3, 3, 3, 3, 1], "a prompt takes two steps; who ends by length is not launched once more"
    engine.close()


def test_a_model_that_cannot_be_recorded_decodes_without_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(build_module, "capture_for", lambda device: refuse)
    engine = triton_engine(folder)
    (prompt,) = engines.random_prompts((5,))
    out = engines.run(engine, [engines.job("a", prompt, max_new_tokens=2)])
    assert out["a"].token_ids == engines.reference(folder, prompt, 2)[0]
    assert "not permitted when stream is capturing" in caplog.text
    engine.close()


def test_buckets() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(32) == [1, 2, 4, 8, 16, 24, 32]
    assert buckets(33)[-2:] == [32, 33]


def test_splits_follow_from_what_a_graph_keeps() -> None:
    assert num_splits(8, 131072, 132) == 64  # one sequence on an H200: many programs share its keys
    assert num_splits(8, 1024, 132) == 4  # but no more than its context fills
    assert num_splits(256 * 8, 131072, 132) == 4
    assert num_splits(1, 100, 1) == 1


def test_buffers_are_padded_and_follow_the_step(folder: Path) -> None:
    engine = engines.tiny_engine(folder, block_size=4)
    engine.add(engines.job("a", [7, 8, 9, 10, 11], temperature=0.5, top_k=3))
    engine.add(engines.job("b", [5, 6]))
    a, b = (piece.sequence for piece in engine._scheduler.schedule())
    buffers = Buffers.allocate(4, 8, 16, torch.device("cpu"))
    writer = BufferWriter(buffers, 4)
    writer.write([Slice(a, 4, 1), Slice(b, 1, 1)])
    slots = [4 * a.block_table[1], 4 * b.block_table[0] + 1]
    assert buffers.longs.tolist() == [[11, 6, 0, 0], [4, 1, 0, 0], [*slots, -1, -1]]
    assert buffers.kv_lens.tolist() == [5, 2, 0, 0]
    assert buffers.block_tables[0, :2].tolist() == a.block_table
    assert buffers.floats[0].tolist() == [0.5, 0, 0, 0]
    assert buffers.top_ks.tolist() == [3, 0, 0, 0]
    keys = buffers.keys.clone()
    assert keys[0].any()
    assert not keys[1:].any()

    a.append(12)  # the same rows, a token later: new keys, the same parameters
    writer.write([Slice(a, 5, 1), Slice(b, 1, 1)])
    assert buffers.longs[:, 0].tolist() == [12, 5, 4 * a.block_table[1] + 1]
    assert not torch.equal(buffers.keys[0], keys[0])
    assert buffers.floats[0].tolist() == [0.5, 0, 0, 0]

    writer.write([Slice(b, 1, 1)])  # one has ended, the other takes its row
    assert buffers.longs.tolist() == [[6, 0, 0, 0], [1, 0, 0, 0], [slots[1], -1, -1, -1]]
    assert buffers.block_tables[0, :1].tolist() == b.block_table
    assert buffers.floats[0].tolist() == [0, 0, 0, 0]

    b.block_table = [b.block_table[0] + 1]  # preempted, and computed again into another block
    writer.forget()
    writer.write([Slice(b, 1, 1)])
    assert buffers.block_tables[0, 0] == b.block_table[0]
    b.block_table = [b.block_table[0] - 1]
    engine.close()
