"""Overlap scheduling changes when results arrive, and nothing else: on a CPU, too, they come a step late with it.

Blocks of 16 tokens and float32 have a row computed the same bit for bit in any step, so that everything is compared as
it is, log-probabilities among it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from headrace.shared.messages import GenerateJob, Lane
from headrace.worker.engine.engine import TransformersEngine
from headrace.worker.engine.plan import Slice
from headrace.worker.engine.runner import ModelRunner
from headrace.worker.engine.stepper import Stepper
from headrace.worker.reading import AtStart
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import engines, tiny_models
from kit.engines import Generation

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "sampling_seed": 5},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "sampling_seed": 6},
    {"max_new_tokens": 1},
    {"temperature": 1.0, "sampling_seed": 7, "frequency_penalty": 0.5},
    {"top_logprobs": 3},
    {"regex": "[a-f]{3,6}"},
]
PROMPTS = engines.random_prompts((4, 30, 9, 17, 6, 11, 25))
POISON = 300  # a token id whose embedding is NaN in the poisoned model
SMALL: dict[str, Any] = {"context_length": 64, "kv_memory": "100kb"}  # room for three of the longest sequences


def engine_of(folder: Path, overlap: str = "on", **settings: Any) -> TransformersEngine:
    return engines.tiny_engine(folder, **({"block_size": 16, "overlap": overlap} | settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[TransformersEngine]:
    engine = engine_of(folder, "off")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ahead(folder: Path) -> Iterator[TransformersEngine]:
    engine = engine_of(folder)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[TransformersEngine]:
    engine = engine_of(folder, **SMALL)
    yield engine
    engine.close()


def said(out: dict[str, Generation]) -> dict[str, tuple[Any, ...]]:
    """What clients see, and nothing of when."""
    return {rid: (each.token_ids, each.logprobs, each.finish, each.prompt) for rid, each in out.items()}


def mixed() -> list[GenerateJob]:
    return [engines.job(str(i), p, **kind) for i, (p, kind) in enumerate(zip(PROMPTS, KINDS, strict=True))]


def test_what_is_said_is_the_same(plain: TransformersEngine, ahead: TransformersEngine) -> None:
    for jobs in (mixed()[:4], mixed(), mixed()[::-1]):
        assert said(engines.run(ahead, jobs)) == said(engines.run(plain, jobs))


def test_steps_are_launched_before_the_tokens_of_the_last_are_known(
    ahead: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        method = getattr(Stepper, name)

        def call(*args: Any) -> Any:
            order.append(name)
            return method(*args)

        return call

    for name in ("launch", "land"):
        monkeypatch.setattr(Stepper, name, noting(name))
    outputs = []
    ahead.add(engines.job("a", PROMPTS[0], max_new_tokens=4))
    while ahead.has_work():
        outputs.append(ahead.step())
        order.append("|")
    assert " ".join(order) == "launch launch land | launch land | launch land | land |", "nothing after the last token"
    assert [len(output.token_ids) for (output,) in outputs] == [1, 1, 1, 1]


def stops(plain: TransformersEngine, prompt: Sequence[int], at: int) -> GenerateJob:
    """A job that ends by a stop id at its `at`th token."""
    tokens = engines.run(plain, [engines.job("s", prompt, max_new_tokens=20)])["s"].token_ids
    assert tokens[at] not in tokens[:at]
    return engines.job("s", prompt, max_new_tokens=20, stop_token_ids=(tokens[at],))


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_stop_costs_a_token_that_nobody_sees_and_no_block(
    plain: TransformersEngine, ahead: TransformersEngine, at: int
) -> None:
    ending = stops(plain, PROMPTS[0], at)
    beside = engines.job("b", PROMPTS[2], max_new_tokens=12)
    for jobs in ([ending], [beside, ending], [ending, beside]):
        expected = engines.run(plain, jobs)
        out = engines.run(ahead, jobs)
        assert said(out) == said(expected)
        assert len(out["s"].token_ids) == at + 1
        assert ahead._scheduler.blocks.num_free == ahead._scheduler.blocks.usable
    again = engines.job("again", [*PROMPTS[0], *out["s"].token_ids, *PROMPTS[1]])
    assert said(engines.run(ahead, [again])) == said(engines.run(plain, [again]))


def test_a_place_that_was_written_for_nothing_is_cleared_before_it_is_read(
    plain: TransformersEngine, ahead: TransformersEngine
) -> None:
    ending = stops(plain, PROMPTS[0], 3)
    ahead.add(ending)
    ahead.add(engines.job("b", PROMPTS[2]))
    while "s" in ahead.running():
        ahead.step()
    (block,) = ahead._scheduler.blocks.dirty  # the prompt of 4 and 4 tokens, and the one after its stop
    pool = ahead._stepper.runner._cache
    assert any(keys[block].any() for keys in pool.keys)  # type: ignore[attr-defined]
    ahead.step()
    assert not any(keys[block].any() for keys in pool.keys)  # type: ignore[attr-defined]
    engines.drain(ahead)


@pytest.mark.parametrize("when", range(7))
def test_abort_between_any_two_steps(plain: TransformersEngine, ahead: TransformersEngine, when: int) -> None:
    jobs = mixed()
    expected = engines.run(plain, jobs)
    for gone in ("0", "1", "5"):
        out: dict[str, Generation] = {}
        for job in jobs:
            ahead.add(job)
        for _ in range(when):
            engines.advance(ahead, out)
        ahead.abort(gone)
        ahead.check_integrity()
        assert gone not in ahead.running()
        before = len(out.get(gone, Generation()).token_ids)
        while ahead.has_work():
            engines.advance(ahead, out)
            ahead.check_integrity()
        assert len(out.pop(gone, Generation()).token_ids) == before
        assert said(out) == {rid: each for rid, each in said(expected).items() if rid != gone}


def test_a_rid_that_comes_again_at_once_is_another_sequence(
    plain: TransformersEngine, ahead: TransformersEngine
) -> None:
    ahead.add(engines.job("a", PROMPTS[0]))
    ahead.step()
    ahead.abort("a")
    other = engines.job("a", PROMPTS[2])
    assert said(engines.run(ahead, [other])) == said(engines.run(plain, [other]))


def test_a_pool_that_is_too_small_for_all(plain: TransformersEngine, small: TransformersEngine) -> None:
    lanes: list[Lane] = ["batch", "std"]
    jobs = [
        engines.job(str(i), prompt, max_new_tokens=30, lane=lanes[i % 2], **KINDS[i % 3])
        for i, prompt in enumerate(PROMPTS)
    ]
    expected, before = engines.run(plain, jobs), small._scheduler.preemptions
    for _ in range(2):  # the second time with what the first one left in the cache
        assert said(engines.run(small, jobs)) == said(expected)
    assert small._scheduler.preemptions > before


def test_prefixes_and_takeovers(plain: TransformersEngine, ahead: TransformersEngine) -> None:
    whole = engines.job("w", [*range(50, 90)], max_new_tokens=20, temperature=1.0, sampling_seed=3)
    tokens = engines.run(plain, [whole])["w"].token_ids
    hits = ahead._scheduler.cache.hit_tokens
    for cut in (0, 1, 7, 19):
        ahead.add(whole, tokens[:cut])
        assert tokens[:cut] + engines.drain(ahead)["w"].token_ids == tokens
    assert ahead._scheduler.cache.hit_tokens > hits


@pytest.mark.parametrize("act", ["retract", "flush", "weights"])
def test_what_happens_between_two_steps_happens_to_what_is_in_flight(
    folder: Path, plain: TransformersEngine, act: str
) -> None:
    ahead = engine_of(folder)
    acts: dict[str, Callable[[], object]] = {
        "retract": ahead.retract,
        "flush": ahead.flush_cache,
        "weights": lambda: ahead.read_weights(str(folder), AtStart())("2"),
    }
    jobs, out = mixed()[:4], dict[str, Generation]()
    for job in jobs:
        ahead.add(job)
    for number in itertools.count():
        if not ahead.has_work():
            break
        engines.advance(ahead, out)
        if number in (0, 2, 5, 6):
            acts[act]()
        ahead.check_integrity()
    assert said(out) == said(engines.run(plain, jobs))
    ahead.close()


def test_a_step_that_cannot_be_launched_is_run_when_all_is_known(
    plain: TransformersEngine, ahead: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, calls = ModelRunner.run, itertools.count()

    def fails_now_and_then(self: ModelRunner, slices: list[Slice], *futures: Any) -> Any:
        guilty = any(piece.sequence.rid == "3" for piece in slices)
        if guilty or (len(slices) > 1 and next(calls) % 3 == 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, slices, *futures)

    expected = engines.run(plain, mixed()[:5])
    monkeypatch.setattr(ModelRunner, "run", fails_now_and_then)
    out = engines.run(ahead, mixed()[:5])
    failed = out.pop("3").finish
    assert failed is not None
    assert failed.type == "error"
    assert said(out) == {rid: each for rid, each in said(expected).items() if rid != "3"}


def test_logits_that_are_not_finite_end_their_own_sequence(folder: Path, tmp_path: Path) -> None:
    poisoned = tiny_models.build(tmp_path / "m")
    weights = safetensors.torch.load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    safetensors.torch.save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine, plain = (engine_of(poisoned, overlap, **SMALL) for overlap in ("on", "off"))
    jobs = [engines.job(str(i), prompt) for i, prompt in enumerate(PROMPTS[:3])]
    jobs.insert(1, engines.job("bad", [POISON, *range(5, 40)]))
    for _ in range(3):  # blocks are used again
        out = engines.run(engine, jobs)
        assert said(out) == said(engines.run(plain, jobs))
        assert out["bad"].finish is not None
    engine.close()
    plain.close()


def test_speculation_goes_before_overlap(folder: Path, plain: TransformersEngine) -> None:
    guessing = engine_of(folder, speculate=4)
    circle = engines.job("c", [7, 8, 9] * 6, max_new_tokens=24)
    jobs = [circle, *mixed()[:3]]
    assert said(engines.run(guessing, jobs)) == said(engines.run(plain, jobs))
    assert guessing._scheduler.speculation.drafted > 0
    guessing.close()


@pytest.fixture(scope="module")
def alone(plain: TransformersEngine) -> Callable[[int, int], Generation]:
    """What a prompt says with a kind of sampling, whatever is beside it."""

    @functools.cache
    def generate(prompt: int, kind: int) -> Generation:
        return engines.run(plain, [engines.job("x", PROMPTS[prompt], **KINDS[kind])])["x"]

    return generate


STEPS = st.integers(1, 4)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(KINDS) - 1), STEPS),
        st.tuples(st.just("resume"), st.integers(0, len(PROMPTS) - 1), st.integers(0, 2), STEPS),
        st.tuples(st.sampled_from(["abort", "flush", "retract"]), st.integers(0, 9), st.just(0), STEPS),
    ),
    min_size=2,
    max_size=14,
)


@given(events=EVENTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_of_events(
    small: TransformersEngine, alone: Callable[[int, int], Generation], events: list[tuple[str, int, int, int]]
) -> None:
    out: dict[str, Generation] = {}
    expected: dict[str, tuple[Generation, int]] = {}  # and how many tokens were made before
    for number, (event, first, second, steps) in enumerate(events):
        rid = str(number)
        if event in ("add", "resume"):
            cut = 3 if event == "resume" else 0
            expected[rid] = alone(first, second), cut
            produced = expected[rid][0].token_ids[:cut]
            small.add(engines.job(rid, PROMPTS[first], **KINDS[second]), produced)
        elif event == "abort" and small.running():
            small.abort(small.running()[first % len(small.running())])
        elif event == "flush":
            small.flush_cache()
        elif event == "retract":
            small.retract()
        small.check_integrity()
        for _ in range(steps):
            if small.has_work():
                engines.advance(small, out)
                small.check_integrity()
    while small.has_work():
        engines.advance(small, out)
        small.check_integrity()
    for rid, (whole, cut) in expected.items():
        made = out.get(rid, Generation())
        ended = made.finish is not None
        tokens = whole.token_ids[cut:]
        assert made.token_ids == (tokens if ended else tokens[: len(made.token_ids)])
        assert made.finish in (None, whole.finish)
        assert made.logprobs == whole.logprobs[cut:][: len(made.logprobs)]
    assert small._scheduler.blocks.num_free == small._scheduler.blocks.usable
