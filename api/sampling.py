"""Sampling fields of every route to `SamplingParams`: request, then the model's generation_config, then defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..shared.errors import InvalidRequest
from ..shared.messages import SamplingParams
from ..shared.model_card import ModelCard
from ..shared.patterns import PatternError, program
from .grammars import grammar_of
from .protocol.common import SamplingFields
from .protocol.native import SamplingParamsBody

V = TypeVar("V")

# What a model's generation_config may decide where a request is silent.
FROM_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def from_openai(fields: SamplingFields, card: ModelCard, max_new_tokens: int | None) -> SamplingParams:
    """Sampling of a chat or completion. `max_new_tokens` None goes on to the context's end."""
    given = _given(fields) | grammar_of(fields, prefix="")
    given["max_new_tokens"] = max_new_tokens
    given["min_new_tokens"] = fields.min_tokens
    given["sampling_seed"] = fields.seed
    given["no_stop_trim"] = fields.no_stop_trim or fields.include_stop_str_in_output
    return _build(given, card, prefix="", keep_none={"max_new_tokens"})


def from_native(fields: SamplingParamsBody, card: ModelCard) -> SamplingParams:
    """Sampling of `/generate`."""
    given = _given(fields) | grammar_of(fields, prefix="sampling_params.")
    for name in ("max_new_tokens", "min_new_tokens", "sampling_seed", "no_stop_trim"):
        given[name] = getattr(fields, name)
    # An explicit null asks for all the context, silence for the default.
    explicit_none = {"max_new_tokens"} & fields.model_fields_set
    return _build(given, card, prefix="sampling_params.", keep_none=explicit_none)


def _given(fields: SamplingFields | SamplingParamsBody) -> dict[str, Any]:
    """What both sets of fields have under one name."""
    return {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "stop": _tuple(fields.stop),
        "stop_token_ids": _tuple(fields.stop_token_ids),
        "stop_regex": _tuple(fields.stop_regex),
        "ignore_eos": fields.ignore_eos,
        "skip_special_tokens": fields.skip_special_tokens,
        "spaces_between_special_tokens": fields.spaces_between_special_tokens,
        "logit_bias": fields.logit_bias,
    }


def _build(given: dict[str, Any], card: ModelCard, prefix: str, keep_none: set[str]) -> SamplingParams:
    if given["stop_regex"]:
        _check_patterns(given, f"{prefix}stop_regex")
    if given["logit_bias"] is not None:
        given["logit_bias"] = _logit_bias(given["logit_bias"], card, f"{prefix}logit_bias")
    for name in FROM_MODEL:
        if given[name] is None:
            given[name] = _model_default(card.generation_config, name)
    for token_id in given["stop_token_ids"] or ():
        if token_id >= card.vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is not in the vocabulary of {card.vocab_size}.", param=f"{prefix}stop_token_ids"
            )
    known: dict[str, Any] = {k: v for k, v in given.items() if v is not None or k in keep_none}
    params = SamplingParams(**known)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest(
            f"At least {params.min_new_tokens} and at most {params.max_new_tokens} tokens cannot both hold.",
            param=f"{prefix}min_new_tokens" if prefix else "min_tokens",
        )
    return params


def _model_default(config: Mapping[str, Any], name: str) -> float | int | None:
    value = config.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    if name == "top_k":
        return int(value) if value >= 1 else -1  # Hugging Face writes 0 for "all tokens"
    return float(value)


def _logit_bias(bias: Mapping[str, float], card: ModelCard, param: str) -> tuple[tuple[int, float], ...]:
    out = []
    for key, value in bias.items():
        # No id has so many digits; Python refuses to read a number of thousands.
        if not (key.isascii() and key.isdigit() and len(key) <= 20 and int(key) < card.vocab_size):
            raise InvalidRequest(
                f"Key {key[:40]!r} of '{param}' is no token id of the vocabulary of {card.vocab_size}.", param=param
            )
        out.append((int(key), value))
    return tuple(out)


def _check_patterns(given: Mapping[str, Any], param: str) -> None:
    """The detokenizer walks them, each request's together: what it could not, is said here."""
    patterns: tuple[str, ...] = given["stop_regex"]
    name = ""
    try:
        for pattern in patterns:
            name = repr(pattern[:80])
            program((pattern,), ())
        name = "with the other stops of the request"
        program(patterns, given["stop"] or ())
    except PatternError as e:
        raise InvalidRequest(f"'{param}' {name} cannot be used: {e}.", param=param) from e


def _tuple(values: list[V] | None) -> tuple[V, ...] | None:
    return None if values is None else tuple(values)
