"""The one place where a body becomes `GenerateReqInput`: online requests and batch lines take the same path.

body ── parse ──► request model ── translate ──► Translated: a GenerateReqInput per prompt, and how to answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from ..shared.messages import GenerateReqInput, Task
from ..shared.model_card import ModelCard
from . import checks, sampling
from .backend import Models
from .checks import Limits, chat_tokens
from .conversation import characters, for_template
from .inputs import Caller, caller_fields, choices_of, known_ids, picks, prompt_of, prompts_of, text_of
from .protocol.chat import ChatCompletionRequest, ChatMessage
from .protocol.common import RequestModel, SamplingFields
from .protocol.completions import CompletionRequest
from .protocol.embeddings import EmbeddingRequest, EncodeRequest
from .protocol.native import GenerateRequest
from .templates import ChatTemplates, RenderOptions
from .tokenize import PromptTokenizer, Tokenizers
from .validation import parse

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/generate", "/v1/embeddings", "/encode", "/classify"]
_VERBS: dict[Task, str] = {"generate": "generate text", "embed": "embed texts", "classify": "classify texts"}
_SERVED: dict[Task, str] = {
    "generate": "generates text: use /v1/chat/completions, /v1/completions or /generate",
    "embed": "embeds texts: use /v1/embeddings or /encode",
    "classify": "classifies texts: use /classify",
}
COMPLETION_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, slots=True)
class Translated:
    """A request in native terms. Choice j of prompt i is choice `i * n + j` of the answer."""

    endpoint: Endpoint
    request: ChatCompletionRequest | CompletionRequest | GenerateRequest | EmbeddingRequest | EncodeRequest
    card: ModelCard
    prompts: tuple[GenerateReqInput, ...]
    max_tokens_given: bool = False  # False: the limit is a default, cut to what the context leaves
    ignored: tuple[str, ...] = ()  # fields of the body that nothing reads

    @property
    def bad_words(self) -> tuple[str, ...]:
        if isinstance(self.request, GenerateRequest):
            return tuple(self.request.sampling_params.bad_words or ())
        return tuple(self.request.bad_words or ()) if isinstance(self.request, SamplingFields) else ()

    @property
    def n(self) -> int:
        return self.prompts[0].n

    @property
    def stream(self) -> bool:
        return self.prompts[0].stream


class Translator:
    """Translates bodies. Holds what that needs: model cards, chat templates, tokenizers, limits."""

    def __init__(self, models: Models, templates: ChatTemplates, tokenizers: Tokenizers, limits: Limits) -> None:
        self._models = models
        self._templates = templates
        self._tokenizers = tokenizers
        self._limits = limits

    async def translate(self, endpoint: Endpoint, body: Any, caller: Caller) -> Translated:
        """`body`, as decoded from JSON, in native terms.

        Raises:
            InvalidRequest: something in it is wrong; the error names the field.
            ModelNotFound: no such model is registered.
        """
        if endpoint == "/v1/chat/completions":
            chat = parse(ChatCompletionRequest, body)
            return await self._chat(chat, caller, _ignored(chat, body))
        if endpoint == "/v1/completions":
            completion = parse(CompletionRequest, body)
            return await self._completion(completion, caller, _ignored(completion, body))
        if endpoint == "/v1/embeddings":
            embedding = parse(EmbeddingRequest, body)
            return await self._embedding(embedding, caller, _ignored(embedding, body))
        if endpoint in ("/encode", "/classify"):
            encode = parse(EncodeRequest, body)
            return await self._encode(endpoint, encode, caller, _ignored(encode, body))
        native = parse(GenerateRequest, body)
        return await self._native(native, caller, _ignored(native, body))

    async def _chat(self, request: ChatCompletionRequest, caller: Caller, ignored: tuple[str, ...]) -> Translated:
        checks.check_chat(request, self._limits)
        card = await self._card(request.model)
        template = self._templates.get(card.chat_template)
        tokenizer = await self._tokenizers.get(card.tokenizer)
        _check_room(request.messages, tokenizer, card)
        messages = for_template(request.messages, template)
        text = template.render(
            tokenizer.guard(messages),
            RenderOptions(
                tools=tokenizer.guard(_tools(request)),
                documents=tokenizer.guard(request.documents),
                add_generation_prompt=_generation_prompt(request),
                continue_final_message=request.continue_final_message,
                kwargs=tokenizer.guard(request.chat_template_kwargs),
            ),
            bos_token=card.bos_token,
            eos_token=card.eos_token,
        )
        prompt = GenerateReqInput(
            model=card.name,
            input_ids=await self._tokenizers.encode_chat(card, text),
            add_special_tokens=False,
            sampling=sampling.from_openai(request, card, chat_tokens(request)),
            n=request.n or 1,
            stream=bool(request.stream),
            return_logprob=bool(request.logprobs),
            top_logprobs_num=request.top_logprobs or 0,
            **caller_fields(caller),
        )
        return Translated("/v1/chat/completions", request, card, (prompt,), chat_tokens(request) is not None, ignored)

    async def _completion(self, request: CompletionRequest, caller: Caller, ignored: tuple[str, ...]) -> Translated:
        prompts = prompts_of(request.prompt)
        checks.check_completion(request, len(prompts), self._limits)
        card = await self._card(request.model)
        tokens = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        params = sampling.from_openai(request, card, tokens)
        shared: dict[str, Any] = {
            "sampling": params,
            **choices_of(request.n, request.best_of),
            "stream": bool(request.stream),
            "return_logprob": request.logprobs is not None or picks(request.n, request.best_of),
            "top_logprobs_num": request.logprobs or 0,
            "logprob_start_len": 0 if request.echo and request.logprobs is not None else -1,
            "return_token_ids": request.return_token_ids,
            "add_special_tokens": request.add_special_tokens,
            **caller_fields(caller),
        }
        inputs = tuple(prompt_of(card, p, "prompt", shared) for p in prompts)
        return Translated("/v1/completions", request, card, inputs, request.max_tokens is not None, ignored)

    async def _native(self, request: GenerateRequest, caller: Caller, ignored: tuple[str, ...]) -> Translated:
        checks.check_native(request)
        param = "text" if request.text is not None else "input_ids"
        prompts = prompts_of(request.text if request.text is not None else request.input_ids)
        n, best_of = request.sampling_params.n, request.sampling_params.best_of
        checks.check_native_counts(request, len(prompts), self._limits)
        card = await self._card(request.model)
        shared: dict[str, Any] = {
            "sampling": sampling.from_native(request.sampling_params, card),
            **choices_of(n, best_of),
            "stream": request.stream,
            "return_logprob": request.return_logprob or picks(n, best_of),
            "top_logprobs_num": request.top_logprobs_num,
            "logprob_start_len": request.logprob_start_len,
            "token_ids_logprob": known_ids(card, request.token_ids_logprob or (), "token_ids_logprob"),
            "return_token_ids": True,
            **caller_fields(caller),
        }
        inputs = tuple(prompt_of(card, p, param, shared) for p in prompts)
        given = request.sampling_params.max_new_tokens is not None
        return Translated("/generate", request, card, inputs, given, ignored)

    async def _embedding(self, request: EmbeddingRequest, caller: Caller, ignored: tuple[str, ...]) -> Translated:
        texts = prompts_of(request.input)
        checks.check_texts(len(texts), "input", self._limits)
        card = await self._card(request.model, "embed")
        checks.check_dimensions(request.dimensions, card)
        inputs = tuple(text_of(card, text, "input", caller) for text in texts)
        return Translated("/v1/embeddings", request, card, inputs, ignored=ignored)

    async def _encode(
        self, endpoint: Endpoint, request: EncodeRequest, caller: Caller, ignored: tuple[str, ...]
    ) -> Translated:
        param = checks.one_form(request.text, request.input_ids)
        texts = prompts_of(request.text if request.text is not None else request.input_ids)
        checks.check_texts(len(texts), param, self._limits)
        card = await self._card(request.model, "embed" if endpoint == "/encode" else "classify")
        checks.check_dimensions(request.dimensions, card)
        inputs = tuple(text_of(card, text, param, caller) for text in texts)
        return Translated(endpoint, request, card, inputs, ignored=ignored)

    async def _card(self, name: str | None, task: Task = "generate") -> ModelCard:
        if name is not None:
            card = await self._models.get(name)
        else:
            cards = [card for card in (await self._models.all()).values() if not card.lora]
            if len(cards) != 1:
                raise ModelNotFound(f"Name a model: {len(cards)} are registered.", param="model")
            card = cards[0]
        if card.task != task:
            raise InvalidRequest(
                f"The model '{card.name}' does not {_VERBS[task]}; it {_SERVED[card.task]}.", param="model"
            )
        return card


def _check_room(messages: Sequence[ChatMessage], tokenizer: PromptTokenizer, card: ModelCard) -> None:
    """Refuse, before a template spends seconds on it, a chat that cannot fit: each message is a token at least."""
    if len(messages) > card.context_length:
        raise ContextLengthExceeded(
            f"This model's context is {card.context_length} tokens; {len(messages)} messages do not fit.",
            param="messages",
        )
    tokenizer.check_size(characters(messages), card, "messages")


def _ignored(request: RequestModel, body: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(request.ignored_fields(body))


def _generation_prompt(request: ChatCompletionRequest) -> bool:
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]
