"""What the fields that several routes share become: prompts, choices, who asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..shared.errors import InvalidRequest
from ..shared.messages import GenerateReqInput, Lane, SamplingParams
from ..shared.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and how urgently."""

    tenant: str = "default"
    request_id: str = ""
    lane: Lane = "std"
    deadline_s: float = 3600.0


def prompts_of(prompt: str | list[str] | list[int] | list[list[int]] | None) -> list[str | list[int]]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    assert prompt
    # Request models let nothing but ids stand beside an id.
    prompts: Any = [prompt] if isinstance(prompt[0], int) else prompt
    return cast(list[str | list[int]], prompts)


def prompt_of(card: ModelCard, prompt: str | list[int], param: str, shared: Mapping[str, Any]) -> GenerateReqInput:
    """One prompt, with the fields that all prompts of its request have.

    Raises:
        InvalidRequest: naming `param`: an id that the model does not know.
    """
    if isinstance(prompt, str):
        return GenerateReqInput(model=card.name, text=prompt, **shared)
    return GenerateReqInput(model=card.name, input_ids=known_ids(card, prompt, param), **shared)


def picks(n: int | None, best_of: int | None) -> bool:
    """Whether more choices are generated than shown."""
    return best_of is not None and best_of > (n or 1)


def choices_of(n: int | None, best_of: int | None) -> dict[str, int]:
    """How many choices are generated, and how many of them are shown."""
    if best_of is not None and picks(n, best_of):
        return {"n": best_of, "best": n or 1}
    return {"n": n or 1}


def known_ids(card: ModelCard, ids: Sequence[int], param: str) -> tuple[int, ...]:
    """The ids. Raises InvalidRequest when one is not in the model's vocabulary."""
    if ids and max(ids) >= card.vocab_size:
        raise InvalidRequest(f"Token id {max(ids)} is not in the vocabulary of {card.vocab_size}.", param=param)
    return tuple(ids)


def text_of(card: ModelCard, text: str | list[int], param: str, caller: Caller) -> GenerateReqInput:
    """A text to embed or to classify. No token comes of it; what fairness charges in advance is one."""
    return prompt_of(
        card, text, param, {"task": card.task, "sampling": SamplingParams(max_new_tokens=1), **caller_fields(caller)}
    )


def caller_fields(caller: Caller) -> dict[str, Any]:
    return {
        "lane": caller.lane,
        "tenant": caller.tenant,
        "deadline_s": caller.deadline_s,
        "request_id": caller.request_id,
    }
