"""`/v1/chat/completions`: request models and the shapes of replies."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypedDict

from pydantic import ConfigDict, Discriminator, Field, Tag

from .common import RequestModel, SamplingFields, StreamOptions, UsageBody


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str


class MediaPart(RequestModel):
    """An image, audio or video part. Its body is read where it is preprocessed."""

    model_config = ConfigDict(extra="allow")

    type: Literal["image_url", "input_image", "video_url", "input_audio", "audio_url", "file"]


ContentPart = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]


def _content_kind(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


# A string or a list of parts; the tag keeps errors to the kind that was sent.
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[ContentPart], Tag("<parts>")], Discriminator(_content_kind)
]


class FunctionCall(RequestModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(RequestModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(RequestModel):
    """One message of the history. What else it carries is handed to the template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(RequestModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: FunctionDefinition


class ChatCompletionRequest(SamplingFields):
    """OpenAI's body, and the extensions that the peers share."""

    no_effect: ClassVar[frozenset[str]] = SamplingFields.no_effect | {
        "parallel_tool_calls", "modalities", "prediction", "verbosity", "reasoning_effort", "web_search_options",
    }  # fmt: skip

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None

    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None  # true unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class LogprobBody(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprobBody(LogprobBody):
    top_logprobs: list[LogprobBody]


class ChatLogprobsBody(TypedDict):
    content: list[ContentLogprobBody]
    refusal: None


class AssistantMessageBody(TypedDict):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoiceBody(TypedDict):
    index: int
    message: AssistantMessageBody
    logprobs: ChatLogprobsBody | None
    finish_reason: str
    matched_stop: NotRequired[str | int]


class ChatCompletionBody(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: UsageBody
    system_fingerprint: str
