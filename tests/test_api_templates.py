"""Chat templates: what they are given, what they may do, and what becomes of special tokens in a client's text."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from headrace.api.conversation import for_template
from headrace.api.inputs import Caller
from headrace.api.protocol.chat import ChatCompletionRequest
from headrace.api.templates import ChatTemplate, ChatTemplates, RenderOptions, detect_content_format
from headrace.api.tokenize import PromptTokenizer, Tokenizers
from headrace.shared.errors import ContextLengthExceeded, InvalidRequest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.fake_backend import BLOB, CHATML, FakeBackend, card, services
from tokenizers import Tokenizer, processors

PARTS = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"


def messages(*raw: dict[str, Any], template: str = CHATML) -> list[dict[str, Any]]:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": list(raw)})
    return for_template(request.messages, ChatTemplate(template))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(template: str, *raw: dict[str, Any], **options: Any) -> str:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(template).render(messages(*raw, template=template), RenderOptions(**options), **tokens)


def prompt_ids(body: dict[str, Any], backend: FakeBackend | None = None) -> tuple[int, ...]:
    async def go() -> tuple[int, ...]:
        prepared = await services(backend or FakeBackend()).inference.prepare("/v1/chat/completions", body, Caller())
        return prepared.jobs[0].input_ids

    return asyncio.run(go())


def test_blocks_are_trimmed_and_the_environment_is_hugging_faces() -> None:
    assert render("  {% if true %}\n  x\n  {% endif %}\ny", user("a")) == "  x\ny"
    assert render("{% for m in messages %}{% if m.content == 'b' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
                  user("a"), user("b"), user("c")) == "a"  # fmt: skip
    assert render("{{ messages | tojson }}", user("世")) == json.dumps([user("世")], ensure_ascii=False)
    assert render("{% generation %}{{ bos_token }}{{ eos_token }}{% endgeneration %}", user("a")) == "<s></s>"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", user("a"))) == 10


def test_what_a_template_raises_is_the_clients_to_read() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", user("a"))
    assert caught.value.param == "messages"
    for source in ("{{ messages[9].content.x }}", "{{ 1 / 0 }}", "{{ missing() }}", "{{ messages + 1 }}"):
        with pytest.raises(InvalidRequest):
            render(source, user("a"))


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ range(10**9) }}"],
)
def test_a_template_is_locked_in(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source + "{{ ().__class__.__base__.__subclasses__() }}", user("a"))


def test_a_template_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="line 2"):
        ChatTemplate("\n{% if %}")


def test_the_prompt_for_an_answer_is_there_unless_it_is_not_wanted() -> None:
    assert render(CHATML, user("a")).endswith("<|im_start|>assistant\n")
    assert not render(CHATML, user("a"), add_generation_prompt=False).endswith("assistant\n")


def test_the_last_message_may_be_continued() -> None:
    said = render(CHATML, user("a"), {"role": "assistant", "content": "I thi "},
                  add_generation_prompt=False, continue_final_message=True)  # fmt: skip
    assert said.endswith("<|im_start|>assistant\nI thi ")
    with pytest.raises(InvalidRequest, match="drops"):
        render("x", user("a"), continue_final_message=True)


def test_an_assistants_last_message_keeps_its_role() -> None:
    text = render(CHATML, user("Q:"), {"role": "assistant", "content": "A:"})
    assert "<|im_start|>assistant\nA:<|im_end|>\n" in text


def test_parts_are_joined_by_newlines_for_templates_that_want_a_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<|im_end|>" in render(CHATML, user(parts))
    assert render(PARTS, user(parts), user("three")) == "[one][two][three]"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, "string"),
        (PARTS, "parts"),
        ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", "parts"),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}", "parts"),
        ("{% for m in messages %}{% for p in m.content | selectattr('type') %}{% endfor %}{% endfor %}", "parts"),
        ("{% for m in messages[1:] %}{{ m.content | trim }}{% endfor %}", "string"),
    ],
)
def test_the_content_format_is_read_off_the_template(source: str, expected: str) -> None:
    assert detect_content_format(source) == expected


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": ""}])
def test_tool_calls_in_the_history(message: dict[str, Any]) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": true}}'}}
    history = messages(
        user("weather?"),
        {"role": "assistant", "tool_calls": [call], **message},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    )
    assert history[1]["content"] == ""
    assert history[1]["tool_calls"][0]["function"]["arguments"] == {"a": {"b": True}}
    assert history[2]["tool_call_id"] == "c1"


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": '}}
    (history,) = messages({"role": "assistant", "content": None, "tool_calls": [call]})
    assert history["tool_calls"][0]["function"]["arguments"] == '{"a": '


def test_a_developer_is_the_system_where_the_template_knows_no_better() -> None:
    assert messages({"role": "developer", "content": "x"})[0]["role"] == "system"
    known = "{% if messages[0].role == 'developer' %}D{% endif %}"
    assert render(known, {"role": "developer", "content": "x"}) == "D"


def test_tools_reach_the_template_unless_none_may_be_called() -> None:
    backend = FakeBackend(cards={"m": card(chat_template="{% if tools %}{{ tools[0].function.name }}{% endif %}~")})
    body: dict[str, Any] = {
        "model": "m",
        "messages": [user("a")],
        "tools": [{"type": "function", "function": {"name": "!!!", "parameters": {"required": None}}}],
    }
    assert len(prompt_ids(body, backend)) == 4
    assert len(prompt_ids(body | {"tool_choice": "auto"}, backend)) == 4
    assert len(prompt_ids(body | {"tool_choice": "none"}, backend)) == 1
    assert len(prompt_ids({"model": "m", "messages": [user("a")], "tool_choice": "none"}, backend)) == 1


def test_kwargs_reach_the_template_and_cannot_replace_the_messages() -> None:
    backend = FakeBackend(cards={"m": card(chat_template="{{ thinking }}{{ messages[0].content }}")})
    body = {"model": "m", "messages": [user("~")], "chat_template_kwargs": {"thinking": "!", "messages": "?"}}
    assert prompt_ids(body, backend) == (33, 126)


def test_a_model_without_a_template_has_no_chats() -> None:
    with pytest.raises(InvalidRequest) as caught:
        prompt_ids({"model": "m", "messages": [user("a")]}, FakeBackend(cards={"m": card(chat_template=None)}))
    assert caught.value.param == "model"


def test_compiled_templates_are_kept_within_a_bound() -> None:
    kept = ChatTemplates(size=2)
    first = kept.get("a")
    kept.get("b")
    assert kept.get("a") is first
    kept.get("c")
    assert kept.get("a") is first
    assert kept.get("b") is not None
    assert ChatTemplates(override="x").get("a").render([], RenderOptions()) == "x"


SPECIALS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from((*SPECIALS, "<|im", "_end|>", "hi", "\n", "世", "\uffff")), max_size=6).map("".join))
def test_a_clients_text_never_becomes_a_special_token(content: str) -> None:
    ids = prompt_ids({"model": "m", "messages": [user(content)]})
    special = [i for i in ids if i in (281, 282, 283)]
    assert special == [282, 283, 282]  # im_start, im_end, im_start: those of the template


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"<|im_end|>": {"a": "<|im_end|>"}}}}]},
        {"documents": [{"<|im_end|>": "<|im_end|>"}]},
        {"chat_template_kwargs": {"thinking": {"<|im_end|>": ["<|im_end|>"]}}},
    ],
)
def test_nor_does_anything_else_that_a_client_sends(more: dict[str, Any]) -> None:
    template = "<|im_start|>{{ tools | tojson }}{{ documents | tojson }}{{ thinking | default(0) | tojson }}<|im_end|>"
    ids = prompt_ids(
        {"model": "m", "messages": [user("a")]} | more, FakeBackend(cards={"m": card(chat_template=template)})
    )
    assert [i for i in ids if i in (281, 282, 283)] == [282, 283]


def test_text_that_reads_as_a_special_token_is_not_changed() -> None:
    tokenizer = PromptTokenizer(BLOB)
    body = {"model": "m", "messages": [user("say <|im_end|> now")]}
    assert tokenizer.decode(prompt_ids(body), skip_special_tokens=True) == "user\nsay <|im_end|> now\nassistant\n"
    plain = tokenizer.encode_chat("<|im_start|>user\nhi<|im_end|>")
    assert plain == tokenizer.encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)


def test_one_bos_never_two() -> None:
    adds_bos = Tokenizer.from_buffer(BLOB)
    adds_bos.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 281)]
    )
    tokenizer = PromptTokenizer(adds_bos.to_str().encode())
    assert tokenizer.encode("~", True, "<|endoftext|>") == [281, 126]
    assert tokenizer.encode("<|endoftext|>~", True, "<|endoftext|>") == [281, 126]
    assert tokenizer.encode_chat("<|endoftext|>~") == [281, 126]


def test_a_tokenizers_own_truncation_and_padding_are_off() -> None:
    cut = Tokenizer.from_buffer(BLOB)
    cut.enable_truncation(2)
    cut.enable_padding(length=8)
    assert len(PromptTokenizer(cut.to_str().encode()).encode("~~~", False)) == 3


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    tokenizer = PromptTokenizer(BLOB)
    longest = max(map(len, Tokenizer.from_buffer(BLOB).get_vocab()))
    tokenizer.check_size(256 * longest, card(), "prompt")
    with pytest.raises(ContextLengthExceeded):
        tokenizer.check_size(256 * longest + 1, card(), "prompt")


def test_tokenizers_are_loaded_once_and_kept_within_a_bound() -> None:
    class Source:
        loads = 0

        async def blob(self, sha256: str) -> bytes:
            self.loads += 1
            await asyncio.sleep(0)
            if sha256 == "bad":
                raise InvalidRequest("gone")
            return BLOB

    async def go() -> None:
        source = Source()
        kept = Tokenizers(source, threads=1, size=2)
        first, again = await asyncio.gather(kept.get("a"), kept.get("a"))
        assert first is again
        assert source.loads == 1
        for name in ("b", "c", "a"):
            await kept.get(name)
        assert source.loads == 4
        for _ in range(2):  # what failed is tried again
            with pytest.raises(InvalidRequest):
                await kept.get("bad")
        assert source.loads == 6
        long_text = "~" * 3000
        ids = await kept.encode(card(context_length=4000), long_text, add_special_tokens=False, param="prompt")
        assert ids == (126,) * 3000
        kept.close()

    asyncio.run(go())
