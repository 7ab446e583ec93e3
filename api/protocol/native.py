"""`/generate`: every capability under its native name, for those who do not want OpenAI's."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import Field

from .common import IdsPrompt, Int64, RequestModel, StrList, TextPrompt, TokenIds, TopK


class SamplingParamsBody(RequestModel):
    """`sampling_params`: the fields of `SamplingParams`. None means unset."""

    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)  # choices generated, of which the n of the highest mean logprob are shown
    max_new_tokens: int | None = Field(None, ge=0)
    min_new_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    stop: StrList | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: StrList | None = None
    stop_regex: StrList | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    sampling_seed: Int64 | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    choice: StrList | None = None


class GenerateRequest(RequestModel):
    """Exactly one of `text` and `input_ids`; either may be a batch."""

    model: str | None = None  # may be left out where one model is registered
    text: TextPrompt | None = None
    input_ids: IdsPrompt | None = None
    sampling_params: SamplingParamsBody = SamplingParamsBody()
    stream: bool = False
    incremental_streaming_output: bool = False  # a stream's events hold what is new instead of all so far
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0)
    logprob_start_len: int = Field(-1, ge=-1)  # also of the prompt's tokens from there on; -1: of none
    token_ids_logprob: TokenIds | None = None  # also of these ids, at each place


class FinishBody(TypedDict):
    type: str
    matched: NotRequired[str | int | None]
    length: NotRequired[int]
    message: NotRequired[str]


# [logprob, token id, token text]; the first token of a prompt has no logprob
TokenLogprobBody = tuple[float | None, int, str]


class MetaInfo(TypedDict):
    id: str
    finish_reason: FinishBody | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    input_token_logprobs: NotRequired[list[TokenLogprobBody]]
    input_top_logprobs: NotRequired[list[list[TokenLogprobBody] | None]]
    input_token_ids_logprobs: NotRequired[list[list[TokenLogprobBody] | None]]
    output_token_logprobs: NotRequired[list[TokenLogprobBody]]
    output_top_logprobs: NotRequired[list[list[TokenLogprobBody] | None]]
    output_token_ids_logprobs: NotRequired[list[list[TokenLogprobBody] | None]]


class GenerateBody(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: NotRequired[int]
