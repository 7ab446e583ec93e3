"""Real weights, and transformers' own greedy choice as what an answer must be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from .engines import reference_model

FOLDERS = {"smollm2-135m": "HEADRACE_TEST_MODEL", "gemma3-270m": "HEADRACE_TEST_GEMMA"}  # names of the variables

# Two sums of float32 in another order differ by a few 1e-5 in these models' logits. Tokens whose logits are closer than
# this are equally likely as far as float32 can tell.
TIE = 1e-4


def folder_of(name: str) -> Path:
    """The weights' folder; skips the test where there is none, and fails it in CI."""
    if given := os.environ.get(FOLDERS[name]):
        return Path(given)
    reason = f"{FOLDERS[name]} names no folder; `headrace fetch {name}` prints one"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def encode(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


@dataclass
class Tally:
    """What became of a comparison, token by token."""

    tokens: int = 0
    ties: int = 0  # tokens that are not transformers' choice, and as likely as it by `TIE`
    closest: float = float("inf")  # the smallest lead of a token over the second likeliest

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.ties} ties of less than {TIE:g}, the closest lead {self.closest:.1e}"


@torch.inference_mode()
def compare(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], batch: int = 8) -> Tally:
    """Assert that each token of each answer is what transformers' eager float32 model takes after those before it.

    By induction these are `generate()`'s tokens, at the price of one forward. Texts of about one length go through it
    together, filled up on the right, where a causal model does not look.
    """
    model, tally = reference_model(folder), Tally()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        whole = [[*prompts[i], *answers[i]] for i in chosen]
        longest = max(map(len, whole))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in whole])
        first = min(len(prompts[i]) for i in chosen) - 1
        logits = model(ids, use_cache=False, logits_to_keep=longest - first).logits
        for row, i in zip(logits, chosen, strict=True):
            begin = len(prompts[i]) - 1 - first
            _compare(row[begin : begin + len(answers[i])], answers[i], tally, f"prompt {i}")
    return tally


def _compare(logits: torch.Tensor, answer: Sequence[int], tally: Tally, name: str) -> None:
    best, second = logits.topk(2).values.T
    lead = best - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]  # 0 where the answer is the likeliest
    assert float(lead.max()) < TIE, (
        f"{name}: token {int(lead.argmax())} is {float(lead.max()):.1e} behind the likeliest"
    )
    tally.tokens += len(answer)
    tally.ties += int((logits.argmax(-1) != torch.tensor(answer)).sum())
    tally.closest = min(tally.closest, float((best - second).min()))
