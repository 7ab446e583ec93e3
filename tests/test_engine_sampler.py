"""Sampling: the right distribution, reproducible whatever the batch, and every parameter does what it says."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from headrace.shared.chunks import TokenLogprob
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.worker.engine.grammar import Masks
from headrace.worker.engine.noise import row_keys
from headrace.worker.engine.sampler import Sample, Sampler
from headrace.worker.engine.sequence import Row, Sequence, stop_ids

gumbel_reference = pytest.importorskip("headrace.kernels.gumbel").gumbel_reference

VOCABULARY = 50
DRAWS = 100_000
CPU = torch.device("cpu")


def row(
    *, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), seed: int = 0, tops: int | None = None, **s: Any
) -> Row:
    params = SamplingParams(**s)
    job = GenerateJob(
        rid="r",
        model="m",
        pool="m",
        tokenizer="",
        input_ids=prompt,
        sampling=params,
        return_logprob=tops is not None,
        top_logprobs_num=tops or 0,
    )
    ids = [*prompt, *output]
    stops = stop_ids(params, (7,), VOCABULARY)
    return Row(Sequence(job, ids, len(prompt), max_tokens=10_000, stop_ids=stops, seed=seed, arrival=0))


def logits_of(vocabulary: int = VOCABULARY, seed: int = 3) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def sample(logits: torch.Tensor, rows: list[Row], masks: Masks | None = None) -> list[Sample]:
    return Sampler(CPU).sample(logits, rows, masks)


def draw(logits: torch.Tensor, count: int, allowed: torch.Tensor | None = None, **params: Any) -> torch.Tensor:
    """Draws with the seeds 0 … count - 1, as counts of each token."""
    first, together = row(**params).sequence, 2000
    rows = [Row(dataclasses.replace(first)) for _ in range(together)]
    many, masks = logits.repeat(together, 1), None
    if allowed is not None:
        words = np.packbits(np.pad(allowed.numpy(), (0, -len(allowed) % 64)), bitorder="little").view(np.int32)
        masks = Masks({one: place for place, one in enumerate(rows)}, np.tile(words, (together, 1)))
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(0, count, together):
        for seed, one in enumerate(rows, start):
            one.sequence.seed = seed
        tokens = [-1 if drawn.token_id is None else drawn.token_id for drawn in sample(many.clone(), rows, masks)]
        counts += torch.bincount(torch.tensor(tokens), minlength=len(logits))
    return counts


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Standard score of the statistic over the cells that expect at least five draws; others are pooled."""
    big = expected >= 5
    seen = torch.cat([observed[big], observed[~big].sum()[None]]).double()
    wanted = torch.cat([expected[big], expected[~big].sum()[None]]).double().clamp_min(1e-9)
    degrees = int(big.sum()) - (0 if float(wanted[-1]) > 1e-6 else 1)
    statistic = float(((seen - wanted) ** 2 / wanted)[: degrees + 1].sum())
    return (statistic - degrees) / math.sqrt(2 * degrees)


LIMITS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.6},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize(
    ("params", "vocabulary"), [(params, 50) for params in LIMITS] + [(params, 1500) for params in LIMITS[::3]], ids=str
)
def test_draws_follow_the_distribution(params: dict[str, Any], vocabulary: int) -> None:
    logits = logits_of(vocabulary)
    observed = draw(logits, DRAWS, **params)
    expected = filtered(logits, **params)
    assert not observed[expected == 0].any(), "a token that the limits exclude was drawn"
    assert abs(chi_square(observed, expected * DRAWS)) < 5


OUTPUT = (3, 3, 3, 11, 12, 40)
BIAS = ((0, 1.5), (7, -100.0), (33, -1.0))
CHANGES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.1},
    {"repetition_penalty": 1.6},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 0.8, "top_p": 0.9},
    {"logit_bias": BIAS},
    {"logit_bias": BIAS, "repetition_penalty": 1.3, "min_p": 0.05, "temperature": 0.8},
    {"bad_words": ((20,), (12, 40, 5), (11, 21)), "stop_token_ids": (9,), "min_new_tokens": 7},
]


@pytest.mark.parametrize(
    ("params", "masked"),
    [(params, False) for params in CHANGES] + [(params, True) for params in ({}, *CHANGES[3::2])],
    ids=str,
)
def test_draws_follow_what_is_left_after_penalties_biases_bans_and_masks(params: dict[str, Any], masked: bool) -> None:
    logits = logits_of()
    allowed = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(5)) < 0.6
    wanted = changed(logits, **params)
    if masked:
        wanted[~allowed] = -torch.inf
    expected = filtered(wanted, **{k: v for k, v in params.items() if k in ("temperature", "top_k", "top_p", "min_p")})
    observed = draw(logits, DRAWS, allowed if masked else None, prompt=(1, 2, 45), output=OUTPUT, **params)
    assert not observed[expected == 0].any(), "a token that is excluded was drawn"
    assert abs(chi_square(observed, expected * DRAWS)) < 5


def changed(logits: torch.Tensor, **s: Any) -> torch.Tensor:
    """Penalties, bias and bans, one token after the other."""
    out = logits.clone()
    for token in range(VOCABULARY):
        if token in (1, 2, 45, *OUTPUT) and (penalty := s.get("repetition_penalty")):
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= s.get("frequency_penalty", 0.0) * OUTPUT.count(token)
        out[token] -= s.get("presence_penalty", 0.0) * (token in OUTPUT)
        out[token] += dict(s.get("logit_bias", ())).get(token, 0.0)
    if "bad_words" in s:
        out[[20, 7, 9]] = -torch.inf  # 5 and 21 would follow other tokens than the last ones
        out[5] = out[5] if OUTPUT[-2:] != (12, 40) else -torch.inf
    return out


def filtered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution by the textbook: sort everything, cut, renormalise."""
    values, order = (logits / temperature).double().sort(descending=True)
    if top_k:
        values[top_k:] = -torch.inf
    p = values.softmax(-1)
    keep = (p.cumsum(-1) - p < top_p) & (p >= min_p * p[0])
    p = torch.where(keep, p, 0.0)
    return torch.zeros_like(p).scatter(0, order, p / p.sum())


def test_noise_is_standard_gumbel_and_positions_are_independent() -> None:
    keys = row_keys([5] * 400, range(400), CPU)
    noise = gumbel_reference(keys, 500)
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    by_position = torch.corrcoef(noise[:50])
    assert float((by_position - torch.eye(50)).abs().max()) < 0.25
    assert float(torch.corrcoef(noise.T[:50]).fill_diagonal_(0).abs().max()) < 0.25


def test_seeds_beyond_64_bits_and_below_zero_are_taken() -> None:
    keys = row_keys([-1, 2**64 - 1, 2**70, 0], [0, 0, 0, 0], CPU)
    assert keys[0].tolist() == keys[1].tolist()
    assert keys[2].tolist() == keys[3].tolist() != keys[0].tolist()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(24, 3000, generator=generator) * 3
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.95},
        {"top_k": 100},
        {"temperature": 0.0},
        {"min_p": 0.05, "temperature": 2.0},
        {"top_p": 0.5, "frequency_penalty": 1.0},
    ]
    rows = [row(seed=i, output=tuple(range(i)), **kinds[i % len(kinds)]) for i in range(24)]
    together = [s.token_id for s in sample(logits.clone(), rows)]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0].token_id for i in range(24)]
    order = torch.randperm(24, generator=generator).tolist()
    shuffled = [s.token_id for s in sample(logits[order], [rows[i] for i in order])]
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_logprobs_are_the_models_own_distribution() -> None:
    logits = logits_of()
    whole = logits.log_softmax(-1)
    rows = [row(tops=3, temperature=0.5, logit_bias=((4, 100.0),)), row(tops=0, temperature=0.0), row()]
    biased, greedy, silent = sample(logits.repeat(3, 1), rows)
    assert biased.token_id == 4
    assert isinstance(biased.logprob, TokenLogprob)
    assert biased.logprob.logprob == pytest.approx(float(whole[4]), abs=1e-5)
    top = whole.topk(3)
    assert [token for token, _ in biased.logprob.top] == top.indices.tolist()
    assert [value for _, value in biased.logprob.top] == pytest.approx(top.values.tolist(), abs=1e-5)
    assert isinstance(greedy.logprob, TokenLogprob)
    assert greedy.logprob.logprob == pytest.approx(float(whole.max()), abs=1e-5)
    assert greedy.logprob.top == ()
    assert silent.logprob is None


def greedy_after(logits: list[float], sequence: Row) -> int | None:
    return sample(torch.tensor([logits + [-50.0] * (VOCABULARY - len(logits))]), [sequence])[0].token_id


def test_penalties_look_where_they_should() -> None:
    scores = [0.0, 0.0, 0.0, 2.0, 1.5, 1.1]
    # Token 3 stands twice in the output, token 4 in the prompt only.
    said: dict[str, Any] = {"prompt": (4,), "output": (3, 3), "temperature": 0.0}
    assert greedy_after(scores, row(**said)) == 3
    assert greedy_after(scores, row(presence_penalty=0.6, **said)) == 4
    assert greedy_after(scores, row(frequency_penalty=0.2, **said)) == 3
    assert greedy_after(scores, row(frequency_penalty=0.3, **said)) == 4
    assert greedy_after(scores, row(repetition_penalty=1.4, **said)) == 3  # 1.43, 1.07, and 1.1 unseen
    assert greedy_after(scores, row(repetition_penalty=1.9, **said)) == 5  # 1.05, 0.79
    assert greedy_after([-1.0, -1.5, -9.0], row(prompt=(0,), repetition_penalty=1.9, temperature=0.0)) == 1


def test_bias_bans_and_minimum() -> None:
    scores = [0.0, 3.0, 2.0, 1.0]
    assert greedy_after(scores, row(temperature=0.0, logit_bias=((3, 5.0),))) == 3
    assert greedy_after(scores, row(temperature=0.0, logit_bias=((1, -100.0),))) == 2
    assert greedy_after(scores, row(temperature=0.0, bad_words=((1,),))) == 2
    assert greedy_after(scores, row(temperature=0.0, bad_words=((9, 1),), output=(9,))) == 2
    assert greedy_after(scores, row(temperature=0.0, bad_words=((9, 1),), output=(8,))) == 1
    stops: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (1,), "min_new_tokens": 2}
    assert greedy_after(scores, row(output=(5,), **stops)) == 2
    assert greedy_after(scores, row(output=(5, 5), **stops)) == 1


def test_one_sampler_keeps_what_stays_and_sees_what_changes() -> None:
    logits, sampler = logits_of().repeat(3, 1), Sampler(CPU)
    rows = [row(seed=i, frequency_penalty=1.5, temperature=0.7 + i) for i in range(3)]
    for step in range(40):
        kept = rows[: 3 - step % 2]  # one comes and goes
        drawn = sampler.sample(logits[: len(kept)].clone(), kept)
        fresh = [dataclasses.replace(one.sequence, token_counts=None) for one in kept]
        assert drawn == Sampler(CPU).sample(logits[: len(kept)].clone(), [Row(sequence) for sequence in fresh])
        for one, sampled in zip(kept, drawn, strict=True):
            assert sampled.token_id is not None
            one.sequence.append(sampled.token_id)


def test_a_row_after_guesses_is_the_row_after_the_same_tokens() -> None:
    kinds: dict[str, Any] = {"frequency_penalty": 0.9, "repetition_penalty": 1.4, "bad_words": ((4, 5),)}
    guessed = [Row(row(output=(3, 4, 4), **kinds).sequence, draft) for draft in ((), (4,), (4, 9), (4, 9, 9))]
    said = [row(output=(3, 4, 4, *one.draft), **kinds) for one in guessed]
    logits = logits_of().repeat(4, 1)
    assert sample(logits.clone(), guessed) == sample(logits.clone(), said)


def test_a_top_k_beyond_all_numbers_of_the_kernel_is_no_limit() -> None:
    logits = logits_of()[None]
    assert sample(logits.clone(), [row(top_k=2**40)]) == sample(logits.clone(), [row()])


def test_named_tokens_and_exclusion() -> None:
    logits = logits_of()
    plain = row(tops=0).sequence
    named = Row(dataclasses.replace(plain, job=dataclasses.replace(plain.job, token_ids_logprob=(5, 5, 8))))
    (told,) = sample(logits[None].clone(), [named])
    assert told.logprob is not None
    assert [token for token, _ in told.logprob.asked] == [5, 5, 8]
    assert [value for _, value in told.logprob.asked] == pytest.approx(
        logits.log_softmax(-1)[[5, 5, 8]].tolist(), abs=1e-5
    )
    nothing = row(bad_words=tuple((i,) for i in range(VOCABULARY)))
    dead, fine = sample(logits.repeat(2, 1), [nothing, row(temperature=0.0)])
    assert dead == Sample(None, excluded=True)
    assert fine.token_id == int(logits.argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_give_no_token_and_spare_the_neighbours(bad: float) -> None:
    logits = torch.stack([logits_of(), logits_of()])
    logits[0, 17] = bad
    broken, fine = sample(logits, [row(tops=2), row(temperature=0.0)])
    assert broken == Sample(None)
    assert fine.token_id == int(logits_of().argmax())
