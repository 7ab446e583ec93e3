"""A model's layers as one program: which steps it runs, that it gives the same bits, and who computes otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headrace.kernels.cpu.program import Program
from headrace.worker.engine import fused_stack
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.fused_layer import FusedLayer
from kit import architectures, engines

ARCHITECTURES = ("llama", "qwen3", "gemma2", "gemma3_text")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that ran, in order."""
    ran: list[Program] = []
    run = Program.run

    def noted(program: Program) -> None:
        ran.append(program)
        run(program)

    monkeypatch.setattr(Program, "run", noted)
    return ran


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    architectures.build(tmp_path, "llama")
    return tmp_path


def decoder_layers(engine: TransformersEngine) -> list[Any]:
    return [module for module in engine._stepper.runner._model.modules() if hasattr(module, "self_attn")]


def without_programs(monkeypatch: pytest.MonkeyPatch) -> Any:
    return monkeypatch.setattr(fused_stack, "install", lambda *_: None)


def answers(engine: TransformersEngine, prompts: list[list[int]]) -> list[Any]:
    jobs = [engines.job(str(n), prompt, top_logprobs=2, max_new_tokens=9 + n) for n, prompt in enumerate(prompts)]
    done = engines.run(engine, jobs)
    return [(done[job.rid].token_ids, done[job.rid].logprobs) for job in jobs]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_that_only_decode_run_as_programs_and_give_the_same_bits(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[Program]
) -> None:
    architectures.build(tmp_path, architecture)
    prompts = engines.random_prompts((3, 20, 21, 60, 7), high=200)
    engine = engines.tiny_engine(tmp_path, block_size=16)
    runs.clear()  # those of the proof
    got = answers(engine, prompts)
    assert len(runs) > 9
    assert 1 < len(set(map(id, runs))) <= len(prompts)  # one for each number of rows
    engine.close()
    without_programs(monkeypatch)
    engine = engines.tiny_engine(tmp_path, block_size=16)
    runs.clear()
    assert answers(engine, prompts) == got
    assert not runs
    engine.close()


def test_hooks_and_chunks_run_layer_by_layer(folder: Path, runs: list[Program]) -> None:
    engine = engines.tiny_engine(folder, block_size=16)
    layers = decoder_layers(engine)
    runs.clear()
    hook = layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: out)
    prompt = engines.random_prompts((30,), high=200)
    hooked = answers(engine, prompt)
    assert not runs  # the first layer had waited for the second
    hook.remove()
    assert answers(engine, prompt) == hooked
    assert len(runs) == len(hooked[0][0]) - 1  # the first token comes out of the prompt's step
    engine.close()


def test_more_rows_than_a_program_takes(folder: Path, runs: list[Program], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = engines.random_prompts((5, 6, 7), high=200)
    engine = engines.tiny_engine(folder, block_size=16)
    wanted = answers(engine, prompts)
    engine.close()
    monkeypatch.setattr("headrace.worker.engine.attention_cpu.MAX_ROWS", 2)
    engine = engines.tiny_engine(folder, block_size=16)
    runs.clear()
    assert answers(engine, prompts) == wanted
    assert len(runs) == 2  # the tokens that two of the three, and then one, write after the first has ended
    engine.close()


def test_a_layer_that_cannot_wait_has_those_before_it_catch_up(folder: Path, runs: list[Program]) -> None:
    engine = engines.tiny_engine(folder, block_size=16)
    layers = decoder_layers(engine)
    stack = layers[0].forward.func
    assert isinstance(stack, fused_stack.FusedStack)
    prompt = engines.random_prompts((30,), high=200)
    wanted = answers(engine, prompt)
    runs.clear()
    last: FusedLayer = stack.layers[-1]
    last.angles = lambda args, kwargs: None  # type: ignore[method-assign]  # its own forward takes the call
    got = answers(engine, prompt)
    assert not runs
    assert got[0][0] == wanted[0][0]
    engine.close()
