"""What a body may not ask, beyond the types of its fields: bounds from the settings, fields that exclude each other."""

from __future__ import annotations

from dataclasses import dataclass

from ..shared.errors import InvalidRequest
from ..shared.model_card import ModelCard
from .conversation import check_parts
from .protocol.chat import ChatCompletionRequest
from .protocol.common import StreamOptions
from .protocol.completions import CompletionRequest
from .protocol.native import GenerateRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one request, from the settings."""

    max_n: int = 128
    max_stop: int = 16
    max_stop_chars: int = 1000
    max_bad_words: int = 1000
    max_logprobs: int = 20
    max_named_logprobs: int = 128
    max_texts: int = 2048


def check_chat(request: ChatCompletionRequest, limits: Limits) -> None:
    """Raises InvalidRequest, naming the field."""
    _check_counts(request.n or 1, "n", request.stop, "stop", limits)
    _check_strings(request.bad_words, "bad_words", limits)
    _check_stream(request.stream, request.stream_options)
    if chat_tokens(request) == 0:
        param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        raise InvalidRequest(f"'{param}' must be at least 1; leave it out for no limit.", param=param)
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    _check_top(request.top_logprobs or 0, "top_logprobs", limits)
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "'add_generation_prompt' and 'continue_final_message' exclude each other.", param="continue_final_message"
        )
    if request.tool_choice == "required" or isinstance(request.tool_choice, dict):
        raise _unavailable("tool_choice", "required, or naming a tool")
    check_parts(request.messages)


def check_completion(request: CompletionRequest, prompts: int, limits: Limits) -> None:
    """Raises InvalidRequest, naming the field."""
    _check_counts(max(request.n or 1, request.best_of or 1) * prompts, "n", request.stop, "stop", limits)
    _check_strings(request.bad_words, "bad_words", limits)
    _check_best_of(request.n, request.best_of, request.stream, "best_of")
    _check_stream(request.stream, request.stream_options)
    _check_top(request.logprobs or 0, "logprobs", limits)
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("'max_tokens' must be at least 1 without 'echo'.", param="max_tokens")
    if request.suffix:
        raise _unavailable("suffix", "filling in before it")


def _unavailable(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' ({what}) is not available on this server.", param=param, code="unsupported_parameter"
    )


def _check_top(top: int, param: str, limits: Limits) -> None:
    if top > limits.max_logprobs:
        raise InvalidRequest(f"At most {limits.max_logprobs} logprobs per token are shown; got {top}.", param=param)


def check_native(request: GenerateRequest) -> None:
    """Raises InvalidRequest unless there is one prompt, in one form."""
    one_form(request.text, request.input_ids)


def one_form(text: object, input_ids: object) -> str:
    """Which of the two fields was given; raises InvalidRequest unless it is exactly one."""
    if (text is None) == (input_ids is None):
        raise InvalidRequest("Give exactly one of 'text' and 'input_ids'.", param="text")
    return "text" if text is not None else "input_ids"


def check_texts(count: int, param: str, limits: Limits) -> None:
    """Raises InvalidRequest where there are more texts than one request may have."""
    if count > limits.max_texts:
        raise InvalidRequest(f"At most {limits.max_texts} texts are taken at once; got {count}.", param=param)


def check_dimensions(dimensions: int | None, card: ModelCard) -> None:
    """Raises InvalidRequest where an embedding has fewer dimensions than asked for, or none."""
    if dimensions is not None and card.task != "embed":
        raise InvalidRequest("'dimensions' is of embeddings.", param="dimensions")
    if dimensions is not None and dimensions > card.dimensions:
        raise InvalidRequest(
            f"'dimensions' must be at most {card.dimensions}, those of '{card.name}'; got {dimensions}.",
            param="dimensions",
        )


def check_native_counts(request: GenerateRequest, prompts: int, limits: Limits) -> None:
    """Raises InvalidRequest, naming the field."""
    params = request.sampling_params
    choices = max(params.n or 1, params.best_of or 1) * prompts
    _check_counts(choices, "sampling_params.n", params.stop, "sampling_params.stop", limits)
    _check_strings(params.bad_words, "sampling_params.bad_words", limits)
    _check_best_of(params.n, params.best_of, request.stream, "sampling_params.best_of")
    _check_top(request.top_logprobs_num, "top_logprobs_num", limits)
    if not request.return_logprob and (request.logprob_start_len >= 0 or request.token_ids_logprob):
        param = "logprob_start_len" if request.logprob_start_len >= 0 else "token_ids_logprob"
        raise InvalidRequest(f"'{param}' needs 'return_logprob': true.", param=param)
    if len(request.token_ids_logprob or ()) > limits.max_named_logprobs:
        raise InvalidRequest(
            f"At most {limits.max_named_logprobs} token ids may be named; got {len(request.token_ids_logprob or ())}.",
            param="token_ids_logprob",
        )


def _check_stream(stream: bool | None, options: StreamOptions | None) -> None:
    if options is not None and not stream:
        raise InvalidRequest("'stream_options' needs 'stream': true.", param="stream_options")


def _check_counts(choices: int, n_param: str, stop: list[str] | None, stop_param: str, limits: Limits) -> None:
    if choices > limits.max_n:
        raise InvalidRequest(
            f"At most {limits.max_n} choices (n times the prompts) are allowed; got {choices}.", param=n_param
        )
    if stop is not None and len(stop) > limits.max_stop:
        raise InvalidRequest(f"At most {limits.max_stop} stop strings are allowed; got {len(stop)}.", param=stop_param)
    _check_lengths(stop, stop_param, limits)


def _check_best_of(n: int | None, best_of: int | None, stream: bool | None, param: str) -> None:
    if best_of is None or best_of == (n or 1):
        return
    if best_of < (n or 1):
        raise InvalidRequest(f"'{param}' must be at least 'n'; got {best_of} for {n}.", param=param)
    if stream:
        raise InvalidRequest(f"'{param}' chooses once all is generated, so it cannot be streamed.", param=param)


def _check_strings(words: list[str] | None, param: str, limits: Limits) -> None:
    if words is not None and len(words) > limits.max_bad_words:
        raise InvalidRequest(f"At most {limits.max_bad_words} are allowed; got {len(words)}.", param=param)
    _check_lengths(words, param, limits)


def _check_lengths(texts: list[str] | None, param: str, limits: Limits) -> None:
    for i, text in enumerate(texts or ()):
        if len(text) > limits.max_stop_chars:
            raise InvalidRequest(
                f"A string here has at most {limits.max_stop_chars} characters; got {len(text)}.",
                param=f"{param}.{i}",
            )


def chat_tokens(request: ChatCompletionRequest) -> int | None:
    """The limit a chat names, under its newer name or its older one."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
