"""Guessed tokens: the output is that of a run without them, whatever is sampled and wherever it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.shared.messages import GenerateJob
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.sampler import Sample, Sampler
from headrace.worker.engine.speculation import Drafter
from hypothesis import given
from hypothesis import strategies as st
from kit import engines, tiny_models

MOST = 5


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 39))
def test_a_guess_is_what_followed_the_longest_suffix_last_time(ids: list[int], most: int, before: int) -> None:
    drafter = Drafter(MOST)
    drafter.draft(ids[:before], most)  # the index grows in two steps
    assert drafter.draft(ids, most) == by_scanning(ids, min(most, MOST))


def by_scanning(ids: list[int], most: int) -> tuple[int, ...]:
    for size in (4, 3, 2):
        for start in range(len(ids) - 1, size - 1, -1):
            if len(ids) >= size and ids[start - size : start] == ids[-size:]:
                return tuple((ids[start:] * most)[:most])
    return ()


def test_a_sequence_whose_guesses_fail_rests_longer_each_time() -> None:
    drafter, ids, pauses = Drafter(MOST), [1, 2, 3, 1, 2, 3], []
    for _ in range(3):
        while drafter.draft(ids, MOST):
            drafter.learn(1, 0, len(ids))
        rests = 0
        while not drafter.draft(ids, MOST):
            ids += [1, 2, 3]
            rests += 3
        pauses.append(rests)
    assert pauses == [9, 18, 33]
    drafter.learn(3, 3, len(ids))
    assert len(drafter.draft(ids, 99)) == MOST


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def plain(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder)
    yield engine
    engine.close()


@pytest.fixture
def guessing(folder: Path) -> Iterator[TransformersEngine]:
    engine = engines.tiny_engine(folder, speculate=MOST)
    yield engine
    engine.close()


# Random models do not repeat themselves, unless they have few tokens to choose from: then some guesses come true.
FEW: dict[str, Any] = {"logit_bias": tuple((token, 40.0) for token in (41, 42, 43, 44))}
CIRCLE = [41, 42, 43, 44, 43] * 5
KINDS: list[dict[str, Any]] = [
    {"max_new_tokens": 24},
    {"max_new_tokens": 25, "top_logprobs": 3},
    {"max_new_tokens": 24, "temperature": 0.7, "sampling_seed": 1},
    {"max_new_tokens": 24, "temperature": 2.0, "top_p": 0.9, "sampling_seed": 2, "top_logprobs": 0},
    {"max_new_tokens": 20, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    {"max_new_tokens": 20, "bad_words": ((41, 42), (44,)), "min_new_tokens": 9, "stop_token_ids": (43,)},
    {"max_new_tokens": 3},
]


def job(rid: str, prompt: list[int] = CIRCLE, **sampling: Any) -> GenerateJob:
    return engines.job(rid, prompt, **FEW | sampling)


def jobs() -> list[GenerateJob]:
    return [job(str(i), CIRCLE[i:], **kind) for i, kind in enumerate(KINDS)]


def test_output_equals_that_without_guesses(plain: TransformersEngine, guessing: TransformersEngine) -> None:
    expected, out = engines.run(plain, jobs()), engines.run(guessing, jobs())
    for rid, generation in expected.items():
        assert out[rid].token_ids == generation.token_ids
        assert out[rid].finish == generation.finish
        assert [one.logprob for one in out[rid].logprobs] == pytest.approx(
            [one.logprob for one in generation.logprobs], abs=1e-3
        )
    speculation = guessing._scheduler.speculation
    assert 5 < speculation.accepted <= speculation.drafted
    assert sum(generation.steps for generation in out.values()) < sum(g.steps for g in expected.values())
    assert guessing._scheduler.blocks.num_free == guessing._scheduler.blocks.usable


def test_a_stop_among_accepted_guesses_ends_the_output_there(
    plain: TransformersEngine, guessing: TransformersEngine
) -> None:
    ends: list[dict[str, Any]] = [{"max_new_tokens": limit} for limit in range(9, 14)]
    ends += [{"max_new_tokens": 24, "stop_token_ids": (43,), "min_new_tokens": least} for least in range(5, 10)]
    batch = [job(str(number), **end) for number, end in enumerate(ends)]
    expected, out = engines.run(plain, batch), engines.run(guessing, batch)
    for one in batch:
        assert out[one.rid].token_ids == expected[one.rid].token_ids
        assert out[one.rid].finish == expected[one.rid].finish
    assert guessing._scheduler.speculation.accepted > 0


def test_guesses_are_checked_though_blocks_are_few_and_cached(plain: TransformersEngine, folder: Path) -> None:
    guessing = engines.tiny_engine(folder, speculate=MOST, context_length=52, kv_memory="40kb")
    batch = [job(str(number), CIRCLE[number : number + 10], max_new_tokens=36) for number in range(3)]
    expected = engines.run(plain, batch)
    for _ in range(2):  # the second time with what the first one left in the cache
        out = engines.run(guessing, batch)
        assert [out[one.rid].token_ids for one in batch] == [expected[one.rid].token_ids for one in batch]
    assert guessing._scheduler.preemptions > 0
    assert guessing._scheduler.speculation.accepted > 0


def test_logits_of_a_guess_that_are_not_finite_cost_the_sequence_its_blocks_and_no_token(
    plain: TransformersEngine, guessing: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engines.run(plain, [job("a", max_new_tokens=20)])["a"].token_ids
    sample, broken = Sampler.sample, list[int]()

    def breaks_guesses(self: Sampler, logits: Any, rows: Any, masks: Any = None) -> list[Sample]:
        samples = sample(self, logits, rows, masks)
        if len(rows) > 1 and not broken:
            broken.append(len(rows))
            samples[-1] = Sample(None)
        return samples

    monkeypatch.setattr(Sampler, "sample", breaks_guesses)
    assert engines.run(guessing, [job("a", max_new_tokens=20)])["a"].token_ids == expected
    assert broken
    assert guessing._scheduler.preemptions == 1


def test_speculation_is_off_where_every_token_is_computed_alone(folder: Path) -> None:
    engine = engines.tiny_engine(folder, speculate=MOST, deterministic=True)
    engines.run(engine, [job("a", max_new_tokens=9)])
    assert engine._scheduler.speculation.drafted == 0
