"""Shared ground of the request models: strict types, OpenAI's sampling fields, the peers' extensions.

Types are strict: `"5"` is no integer. Unknown fields are dropped (`ignored_fields` names them); NaN and infinities
never get here, for orjson refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ...shared.chunks import Usage

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _top_k(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("must be at least 1, or -1 for all tokens")
    return value


def _text_kind(value: Any) -> str:
    return "<texts>" if isinstance(value, list) else "<text>"


def _ids_kind(value: Any) -> str:
    return "<batch>" if isinstance(value, list) and value and isinstance(value[0], list) else "<ids>"


def _prompt_kind(value: Any) -> str:
    return (
        _text_kind(value) if not isinstance(value, list) or (value and isinstance(value[0], str)) else _ids_kind(value)
    )


StrList = Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)]
TokenIds = list[Annotated[int, Field(ge=0, le=2**32)]]
TopK = Annotated[int, AfterValidator(_top_k)]

# One prompt or several, as text or as token ids. The tags keep an error to the form that was sent; no field has
# such a name.
_Text = Annotated[str, Tag("<text>")]
_Texts = Annotated[list[str], Tag("<texts>"), Field(min_length=1)]
_Ids = Annotated[TokenIds, Tag("<ids>"), Field(min_length=1)]
_Batch = Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Tag("<batch>")]
TextPrompt = Annotated[_Text | _Texts, Discriminator(_text_kind)]
IdsPrompt = Annotated[_Ids | _Batch, Discriminator(_ids_kind)]
Prompt = Annotated[_Text | _Texts | _Ids | _Batch, Discriminator(_prompt_kind)]


class RequestModel(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    # Accepted and without effect here; known, so that they are not reported as ignored.
    no_effect: ClassVar[frozenset[str]] = frozenset(
        {"user", "store", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
    )

    @classmethod
    def ignored_fields(cls, body: Mapping[str, Any]) -> list[str]:
        """Names in `body` that nothing here reads."""
        return sorted(body.keys() - cls.model_fields.keys() - cls.no_effect)


class SchemaFormat(RequestModel):
    """`json_schema` of a response format. `strict` changes nothing: what is asked for is always held to."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None
    # Of a structural tag, in its newer and its older form.
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(RequestModel):
    """Grammars under vLLM's names; at most one."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Annotated[str, Field(min_length=1)]] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool | None = None


class SamplingFields(RequestModel):
    """Sampling as OpenAI names it, and the extensions under the names that SGLang and vLLM share.

    None means unset: the model's generation_config decides, then `SamplingParams`.
    """

    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Int64 | None = None
    stop: StrList | None = None
    max_tokens: int | None = Field(None, ge=0)

    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: TokenIds | None = None
    bad_words: StrList | None = None
    stop_regex: StrList | None = None
    no_stop_trim: bool = False
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    # Grammars; at most one.
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    choice: StrList | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: StrList | None = None


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class TokensDetails(TypedDict):
    cached_tokens: int


class UsageBody(TypedDict):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[TokensDetails]


def usage_body(prompts: list[list[Usage]]) -> UsageBody:
    """Usage of a request: of each prompt the usages of its choices.

    A prompt counts once, whatever the number of its choices; so do its cached tokens, and a choice that found the
    prompt in the cache because an earlier choice had put it there does not count.
    """
    prompt = sum(max(usage.prompt_tokens for usage in choices) for choices in prompts)
    completion = sum(usage.completion_tokens for choices in prompts for usage in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(min(usage.cached_tokens for usage in choices) for choices in prompts)
        },
    }
