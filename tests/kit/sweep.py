"""What becomes of each decoder architecture of transformers: the table of docs/architectures.md is written here.

`make architectures` runs `main`; names of some architectures print their outcomes alone.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from headrace.shared.errors import ConfigError, ModelRefused
from headrace.worker.engine import build as build_module
from headrace.worker.engine.engine import TransformersEngine
from huggingface_hub.errors import StrictDataclassError

from . import architectures, engines
from .engines import Generation

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
Verdict = Literal["works", "refused", "not tried"]

CONTEXT_LENGTH = 80
_BLOCKS = 28  # of four tokens: less than all of `_LONG` need
_PROMPTS = (7, 33, 20, 50, 3)
_OUTPUT = 6
_LONG = (20, 20, 20, 7, 3)  # prompts of `_LONG_OUTPUT` tokens each: admission expects half of that, so blocks run out
_LONG_OUTPUT = 30
_TOLERANCE = 2e-3  # of log-probabilities


@dataclass(frozen=True, slots=True)
class Outcome:
    """`works`: equal to transformers' eager forward. `refused`: at load, with a reason. `not tried`: no tiny model."""

    verdict: Verdict
    reason: str = ""


def outcome(architecture: str) -> Outcome:
    """Build a tiny model, load it, and compare it. Raises AssertionError where it is served and wrong."""
    if architecture in architectures.UNTRIED:
        return Outcome("not tried", architectures.UNTRIED[architecture])
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        try:
            architectures.build(folder, architecture)
            engines.reference(folder, [5, 6, 7], 1)
        except (
            AttributeError,
            ImportError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
            StrictDataclassError,
        ) as e:
            return Outcome("not tried", f"no tiny model could be made: {type(e).__name__}")
        try:
            engine = _load(folder)
        except (ModelRefused, ConfigError) as e:
            return Outcome("refused", _reason(e, folder))
        compare(engine, folder)
        engine.close()
        return Outcome("works")


def compare(engine: TransformersEngine, folder: Path) -> None:
    """Raises AssertionError where tokens or log-probabilities are not those of transformers' eager forward."""
    prompts = engines.random_prompts(_PROMPTS)
    jobs = [engines.job(str(i), p, max_new_tokens=_OUTPUT, top_logprobs=32) for i, p in enumerate(prompts)]
    mixed = engines.run(engine, jobs)
    for number, prompt in enumerate(prompts):
        _assert_equal(folder, prompt, mixed[str(number)])
    for number, prompt in enumerate(prompts):  # taken over half way
        produced = mixed[str(number)].token_ids[: 1 + number]
        engine.add(engines.job(str(number), prompt, max_new_tokens=_OUTPUT, top_logprobs=32), produced)
    for rid, generation in engines.drain(engine).items():
        assert generation.token_ids == mixed[rid].token_ids[1 + int(rid) :], "after a takeover"
    again = engines.run(engine, jobs)  # and once more, out of the prefix cache
    assert all((again[str(i)].cached_tokens or 0) > 0 for i, prompt in enumerate(prompts) if len(prompt) == 50)
    for number, prompt in enumerate(prompts):
        _assert_equal(folder, prompt, again[str(number)])
    before = engine._scheduler.preemptions
    prompts = [prompt[:length] for prompt, length in zip(engines.random_prompts([20] * 5, seed=2), _LONG, strict=True)]
    long = engines.run(engine, [engines.job(str(i), p, max_new_tokens=_LONG_OUTPUT) for i, p in enumerate(prompts)])
    assert engine._scheduler.preemptions > before, "the pool should be too small for all of them"
    for number, prompt in enumerate(prompts):
        _assert_equal(folder, prompt, long[str(number)])


@torch.inference_mode()
def _assert_equal(folder: Path, prompt: list[int], generation: Generation) -> None:
    ids = torch.tensor([prompt + generation.token_ids])
    logits = engines.reference_model(folder)(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert generation.token_ids == logits.argmax(-1).tolist(), f"tokens after a prompt of {len(prompt)}"
    for logprob, row in zip(generation.logprobs, logits.float().log_softmax(-1), strict=False):
        places, values = zip(*logprob.top, strict=True)
        worst = (torch.tensor(values) - row[list(places)]).abs().max().item()
        assert worst < _TOLERANCE, f"log-probabilities {worst:.1e} apart after a prompt of {len(prompt)}"


def _load(folder: Path) -> TransformersEngine:
    with mock.patch.object(build_module, "num_blocks", return_value=_BLOCKS):
        return engines.tiny_engine(folder, context_length=CONTEXT_LENGTH)


def _reason(error: Exception, folder: Path) -> str:
    text = re.sub(r"\s+", " ", str(error).replace(f"--model {folder}: ", ""))
    return text.partition(". Serve a ")[0]


def every_architecture() -> list[str]:
    """What AutoModelForCausalLM knows, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def read_table() -> dict[str, Outcome]:
    """The outcomes that the table says."""
    rows = re.findall(r"^\| `([^`]+)` \| (works|refused|not tried) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    return {name: Outcome(verdict, reason) for name, verdict, reason in rows}


def write_table(outcomes: dict[str, Outcome]) -> None:
    """Replace the table's rows, and the sentence that counts them."""
    import transformers

    text = TABLE.read_text()
    rows = "".join(f"| `{n}` | {o.verdict} | {o.reason.replace('|', '/')} |\n" for n, o in sorted(outcomes.items()))
    counts = [sum(o.verdict == v for o in outcomes.values()) for v in ("works", "refused", "not tried")]
    head, _, _ = text.partition("transformers ")
    text = (
        f"{head}transformers {transformers.__version__} knows {len(outcomes)} decoder architectures: "
        f"{counts[0]} work, {counts[1]} are refused, {counts[2]} could not be tried.\n\n"
        f"| architecture | | why |\n|---|---|---|\n{rows}"
    )
    TABLE.write_text(text)


def main(names: Iterable[str]) -> int:
    chosen = list(names) or every_architecture()
    outcomes: dict[str, Any] = {}
    for name in chosen:
        outcomes[name] = outcome(name)
        sys.stdout.write(f"{name:28} {outcomes[name].verdict:10} {outcomes[name].reason}\n")
        sys.stdout.flush()
    if len(chosen) == len(every_architecture()):
        write_table(outcomes)
    return 0
