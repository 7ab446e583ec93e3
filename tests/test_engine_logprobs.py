"""Log-probabilities of prompts and of named tokens equal a plain forward's, however the prompt was computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from headrace.shared.chunks import PromptLogprobs
from headrace.shared.errors import InvalidRequest
from headrace.shared.messages import GenerateJob
from headrace.worker.engine import logprobs
from headrace.worker.engine.engine import TransformersEngine
from kit import engines, tiny_models

PROMPT = engines.random_prompts([61])[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("logprobs") / "m", "qwen3")


@pytest.fixture
def engine(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder)
    yield engine
    engine.close()


def scoring(rid: str = "a", start: int = 0, asked: tuple[int, ...] = (), tops: int = 2, **sampling: Any) -> GenerateJob:
    sampling.setdefault("max_new_tokens", 3)
    job = engines.job(rid, PROMPT, top_logprobs=tops, **sampling)
    return dataclasses.replace(job, logprob_start_len=start, token_ids_logprob=asked)


@pytest.fixture(scope="module")
def expected(folder: Path) -> torch.Tensor:
    """[prompt - 1, vocabulary]: what transformers thinks of each token but the first."""
    with torch.inference_mode():
        logits: torch.Tensor = engines.reference_model(folder)(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1]


def check(prompt: PromptLogprobs | None, expected: torch.Tensor, start: int = 0, tops: int = 2) -> None:
    assert prompt is not None
    assert list(prompt.token_ids) == PROMPT[start:]
    assert len(prompt.logprobs) == len(prompt.token_ids)
    for place, told in enumerate(prompt.logprobs, start):
        if place == 0:
            assert told.logprob is None
            assert not told.top
            continue
        row = expected[place - 1]
        assert told.logprob == pytest.approx(float(row[PROMPT[place]]), abs=1e-4)
        assert [value for _, value in told.top] == pytest.approx(
            row.topk(tops).values.tolist() if tops else [], abs=1e-4
        )
        assert [value for token, value in told.top] == pytest.approx(
            [float(row[token]) for token, _ in told.top], abs=1e-4
        )


@pytest.mark.parametrize("start", [0, 1, 17, len(PROMPT) - 1, len(PROMPT)])
def test_from_any_place_in_chunks(engine: TransformersEngine, expected: torch.Tensor, start: int) -> None:
    done = engines.run(engine, [engines.job("b", PROMPT[:9]), scoring(start=start)])
    check(done["a"].prompt, expected, start)
    assert done["b"].prompt is None
    assert len(done["a"].logprobs) == len(done["a"].token_ids) == 3


def test_also_where_the_prefix_is_cached(engine: TransformersEngine, expected: torch.Tensor) -> None:
    plain = engines.run(engine, [engines.job("b", PROMPT, max_new_tokens=3)])["b"]
    scored = engines.run(engine, [scoring()])["a"]
    check(scored.prompt, expected)
    assert scored.token_ids == plain.token_ids
    check(engines.run(engine, [scoring()])["a"].prompt, expected)


def test_without_any_token(engine: TransformersEngine, expected: torch.Tensor) -> None:
    done = engines.run(engine, [scoring(max_new_tokens=0, tops=0), engines.job("b", (5,), max_new_tokens=0)])
    check(done["a"].prompt, expected, tops=0)
    for rid in "ab":
        assert done[rid].token_ids == []
        finish = done[rid].finish
        assert finish is not None
        assert finish.type == "length"


def test_a_prompt_as_long_as_the_context_is_scored(engine: TransformersEngine) -> None:
    job = dataclasses.replace(scoring(max_new_tokens=0), input_ids=tuple(PROMPT * 5)[: tiny_models.CONTEXT_LENGTH])
    prompt = engines.run(engine, [job])["a"].prompt
    assert prompt is not None
    assert len(prompt.logprobs) == tiny_models.CONTEXT_LENGTH
    with pytest.raises(InvalidRequest):
        engine.add(dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, max_new_tokens=1)))


def test_named_tokens_in_prompt_and_output(engine: TransformersEngine, expected: torch.Tensor) -> None:
    done = engines.run(engine, [scoring(asked=(7, 300, 7)), scoring("b", start=-1, asked=(9,)), scoring("c", tops=0)])
    prompt = done["a"].prompt
    assert prompt is not None
    for place, told in enumerate(prompt.logprobs[1:]):
        assert [token for token, _ in told.asked] == [7, 300, 7]
        assert [value for _, value in told.asked] == pytest.approx(expected[place, [7, 300, 7]].tolist(), abs=1e-4)
    assert done["b"].prompt is None
    assert [[token for token, _ in told.asked] for told in done["b"].logprobs] == [[9]] * 3
    assert [told.asked for told in done["c"].logprobs] == [()] * 3
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.add(scoring("d", asked=(tiny_models.VOCAB_SIZE,)))


def test_few_logits_at_once(
    engine: TransformersEngine, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "SCORED_LOGITS", tiny_models.VOCAB_SIZE * 5)
    done = engines.run(engine, [scoring(), scoring("b", start=30), engines.job("c", PROMPT)])
    check(done["a"].prompt, expected)
    check(done["b"].prompt, expected, 30)
    assert len(done["c"].token_ids) == 8
    assert done["a"].steps >= len(PROMPT) // 5


def test_sent_back_while_it_is_read(engine: TransformersEngine, expected: torch.Tensor) -> None:
    engine.add(scoring())
    done: dict[str, engines.Generation] = {}
    for _ in range(2):
        engines.advance(engine, done)
    engine.retract()
    for rid, generation in engines.drain(engine).items():
        check(generation.prompt, expected)
        assert (rid, len(generation.token_ids)) == ("a", 3)


def test_a_worker_that_takes_over_scores_again_only_what_was_not_published(
    engine: TransformersEngine, expected: torch.Tensor
) -> None:
    whole = engines.run(engine, [scoring()])["a"]
    engine.add(scoring(), whole.token_ids[:1])
    rest = engines.drain(engine)["a"]
    assert rest.prompt is None
    assert rest.token_ids == whole.token_ids[1:]


def test_deterministic_and_scored(folder: Path, expected: torch.Tensor) -> None:
    engine = engines.tiny_engine(folder, deterministic=True)
    first = engines.run(engine, [scoring()])["a"]
    again = engines.run(engine, [scoring(), scoring("b"), engines.job("c", PROMPT)])["a"]
    check(first.prompt, expected)
    assert first.prompt == again.prompt
    engine.close()
