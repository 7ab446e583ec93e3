"""Bodies to native terms: defaults, bounds, what is refused and which field is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from headrace.api.inputs import Caller
from headrace.api.prepare import Prepared
from headrace.api.translate import Endpoint
from headrace.shared.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, RequestError
from headrace.shared.messages import GRAMMARS
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.fake_backend import FakeBackend, card, services

CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
GENERATE: Endpoint = "/generate"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def prepare(endpoint: Endpoint, body: Any, backend: FakeBackend | None = None, **caller: Any) -> Prepared:
    async def go() -> Prepared:
        return await services(backend or FakeBackend()).inference.prepare(endpoint, body, Caller(**caller))

    return asyncio.run(go())


def refused(endpoint: Endpoint, body: Any, backend: FakeBackend | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(endpoint, body, backend)
    return caught.value


def test_a_chat_goes_on_to_the_contexts_end_and_a_completion_to_16_tokens() -> None:
    (job,) = prepare(CHAT, HI).jobs
    assert job.sampling.max_new_tokens == 256 - len(job.input_ids)
    assert prepare(COMPLETIONS, {"model": "m", "prompt": "hi"}).jobs[0].sampling.max_new_tokens == 16
    assert prepare(GENERATE, {"text": "hi"}).jobs[0].sampling.max_new_tokens == 128


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert prepare(CHAT, HI | {"max_tokens": 9, "max_completion_tokens": 3}).jobs[0].sampling.max_new_tokens == 3


def test_null_means_all_the_context_on_the_native_route() -> None:
    (job,) = prepare(GENERATE, {"text": "hi", "sampling_params": {"max_new_tokens": None}}).jobs
    assert job.sampling.max_new_tokens == 254


def test_a_default_is_cut_to_the_context_and_a_wish_is_refused() -> None:
    ids = [97] * 250
    assert prepare(COMPLETIONS, {"model": "m", "prompt": ids}).jobs[0].sampling.max_new_tokens == 6
    error = refused(COMPLETIONS, {"model": "m", "prompt": ids, "max_tokens": 7})
    assert isinstance(error, ContextLengthExceeded)
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")


@pytest.mark.parametrize("size", [256, 257, 100_000])
def test_a_prompt_as_long_as_the_context_is_refused(size: int) -> None:
    bodies: tuple[tuple[Endpoint, Any], ...] = (
        (COMPLETIONS, {"model": "m", "prompt": "~" * size}),
        (COMPLETIONS, {"model": "m", "prompt": [97] * size}),
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "~" * size}]}),
        (GENERATE, {"text": "~" * size}),
    )
    for endpoint, body in bodies:
        assert refused(endpoint, body).code == "context_length_exceeded"


def test_unset_values_come_from_the_models_generation_config() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 0, "repetition_penalty": 1.1, "do_sample": True}
    backend = FakeBackend(cards={"m": card(generation_config=config)})
    sampling = prepare(CHAT, HI, backend).jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, -1)
    assert sampling.repetition_penalty == 1.1
    assert prepare(CHAT, HI | {"temperature": 0}, backend).jobs[0].sampling.temperature == 0


def test_every_sampling_field_reaches_the_job() -> None:
    body = HI | {
        "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -1,
        "repetition_penalty": 1.5, "logit_bias": {"5": -100}, "seed": 11, "stop": "END", "stop_token_ids": [3],
        "min_tokens": 2, "max_tokens": 4, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip
    s = prepare(CHAT, body).jobs[0].sampling
    assert dataclasses.asdict(s) == {
        "max_new_tokens": 4, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1,
        "frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5, "stop": ("END",),
        "stop_token_ids": (3,), "stop_regex": (), "no_stop_trim": True, "ignore_eos": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "logit_bias": ((5, -100.0),),
        "bad_words": (), "sampling_seed": 11, "json_schema": None, "regex": None, "ebnf": None,
        "structural_tag": None, "choice": (),
    }  # fmt: skip


def test_every_name_of_a_grammar_is_one_native_field() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = '{"type":"object","properties":{"a":{"type":"integer"}}}'
    tag = {"type": "triggered_tags", "triggers": ["<f"], "tags": []}
    old = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    content = {"type": "json_schema", "json_schema": schema}
    old_tags = [{"begin": "<f>", "content": content, "end": "</f>"}]
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}},
         "json_schema", text),
        ({"response_format": {"type": "structural_tag", "format": tag}}, "structural_tag", tag),
        ({"response_format": {"type": "structural_tag", **old}}, "structural_tag", tag | {"tags": old_tags}),
        ({"json_schema": schema}, "json_schema", text),
        ({"json_schema": json.dumps(schema)}, "json_schema", text),
        ({"guided_json": schema}, "json_schema", text),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"json": schema}}, "json_schema", text),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
    ]  # fmt: skip
    for body, name, value in cases:
        both: tuple[tuple[Endpoint, dict[str, Any]], ...] = ((CHAT, HI), (COMPLETIONS, {"model": "m", "prompt": "x"}))
        for endpoint, base in both:
            sampling = prepare(endpoint, base | body).jobs[0].sampling
            given = getattr(sampling, name)
            assert (json.loads(given)["format"] if name == "structural_tag" else given) == value
            assert sum(bool(getattr(sampling, kind)) for kind in GRAMMARS) == 1
    assert prepare(CHAT, HI | {"response_format": {"type": "text"}}).jobs[0].sampling.json_schema is None
    native = {"text": "x", "sampling_params": {"ebnf": 'root ::= "a"'}}
    assert prepare(GENERATE, native).jobs[0].sampling.ebnf == 'root ::= "a"'
    assert refused(GENERATE, {"text": "x", "sampling_params": {"regex": ""}}).param == "sampling_params.regex"


def test_bad_words_are_tokens_with_and_without_a_space_before() -> None:
    asked = {"bad_words": ["ab", " c"]}
    wanted = ((97, 98), (32, 97, 98), (99,), (32, 99))
    both: tuple[tuple[Endpoint, dict[str, Any]], ...]
    both = (CHAT, HI | asked), (COMPLETIONS, {"model": "m", "prompt": "x"} | asked)
    for endpoint, body in both:
        words = prepare(endpoint, body).jobs[0].sampling.bad_words
        assert [bytes(word) for word in words] == [bytes(word) for word in wanted]
    native = prepare(GENERATE, {"text": "x", "sampling_params": asked}).jobs[0].sampling.bad_words
    assert len(native) == 4


def test_scores_of_a_long_prompt_are_bounded() -> None:
    backend = FakeBackend(cards={"m": card(context_length=100_000)})
    body = {"model": "m", "prompt": [97] * 60_000, "echo": True, "logprobs": 20, "max_tokens": 1}
    assert refused(COMPLETIONS, body, backend).param == "logprobs"
    assert prepare(COMPLETIONS, body | {"logprobs": 5}, backend).jobs[0].logprob_start_len == 0
    native = {"input_ids": [97] * 60_000, "return_logprob": True, "top_logprobs_num": 20}
    assert refused(GENERATE, native | {"logprob_start_len": 0}, backend).param == "logprob_start_len"
    assert prepare(GENERATE, native | {"logprob_start_len": 50_000}, backend).jobs


def test_best_of_generates_more_than_it_shows() -> None:
    both: tuple[tuple[Endpoint, dict[str, Any]], ...] = (
        (COMPLETIONS, {"model": "m", "prompt": "x", "n": 2, "best_of": 5}),
        (GENERATE, {"text": "x", "sampling_params": {"n": 2, "best_of": 5}}),
    )
    for endpoint, body in both:
        prepared = prepare(endpoint, body)
        assert (prepared.plan.n, prepared.plan.best, prepared.plan.logprobs) == (5, 2, False)
        assert prepared.jobs[0].return_logprob
    plain = prepare(COMPLETIONS, {"model": "m", "prompt": "x", "n": 2, "best_of": 2})
    assert (plain.plan.n, plain.plan.best, plain.jobs[0].return_logprob) == (2, 0, False)


def test_a_seed_stays_exact_in_redis_and_one_is_chosen_where_none_is_given() -> None:
    for seed in (-(2**63), -1, 2**53 + 1, 2**63 - 1):
        chosen = prepare(CHAT, HI | {"seed": seed}).jobs[0].sampling.sampling_seed
        assert chosen is not None
        assert 0 <= chosen < 2**52
        assert chosen == prepare(CHAT, HI | {"seed": seed}).jobs[0].sampling.sampling_seed
    assert prepare(CHAT, HI).jobs[0].sampling.sampling_seed != prepare(CHAT, HI).jobs[0].sampling.sampling_seed


def test_prompts_in_all_four_forms() -> None:
    def ids(prompt: Any) -> list[tuple[int, ...]]:
        return [job.input_ids for job in prepare(COMPLETIONS, {"model": "m", "prompt": prompt}).jobs]

    assert ids("~~") == ids(["~~"]) == ids([126, 126]) == ids([[126, 126]]) == [(126, 126)]
    assert ids(["~", "~~"]) == ids([[126], [126, 126]]) == [(126,), (126, 126)]


def test_an_empty_prompt_begins_with_bos() -> None:
    (job,) = prepare(COMPLETIONS, {"model": "m", "prompt": ""}).jobs
    assert job.input_ids == (281,)


def test_one_seeded_name_is_one_request() -> None:
    async def go() -> tuple[str, ...]:
        prepared = await services(FakeBackend()).inference.prepare(CHAT, HI, Caller(), seed="batch_1/7/0")
        return prepared.plan.families

    assert asyncio.run(go()) == asyncio.run(go())


def test_lane_tenant_and_request_id_reach_the_job() -> None:
    (job,) = prepare(CHAT, HI, tenant="t", lane="batch", request_id="r").jobs
    assert (job.tenant, job.lane, job.request_id) == ("t", "batch", "r")


def test_unknown_fields_are_named_and_ignored() -> None:
    prepared = prepare(CHAT, HI | {"user": "u", "metadata": {}, "frobnicate": 1, "zeal": []})
    assert prepared.ignored == ("frobnicate", "zeal")


def test_n_choices_share_a_family_and_prompts_have_their_own() -> None:
    plan = prepare(COMPLETIONS, {"model": "m", "prompt": ["a", "b"], "n": 2}).plan
    assert len(plan.families) == 2
    assert plan.rids == tuple(f"{family}.{i}" for family in plan.families for i in range(2))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": {}}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"model": "nope"}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x", "y" * 1001]}, "stop.1"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"top_logprobs": "5"}, "top_logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream_options": 5, "stream": True}, "stream_options"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "5"}, "json_schema"),
        ({"json_schema": {"items": {"type": "strange"}}}, "json_schema"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "json_schema"),
        ({"json_schema": {"enum": ["x" * 300_000]}}, "json_schema"),
        ({"structural_tag": "[]"}, "structural_tag"),
        ({"structural_tag": {"structures": [{}], "triggers": []}}, "structural_tag"),
        ({"regex": ""}, "regex"),
        ({"ebnf": " "}, "ebnf"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice.0"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"stop_regex": "a$"}, "stop_regex"),
        ({"stop_regex": ["a", "("]}, "stop_regex"),
        ({"stop_regex": "a*"}, "stop_regex"),
        ({"stop": ["x" * 400], "stop_regex": "y{400}"}, "stop_regex"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], param: str) -> None:
    error = refused(CHAT, {k: v for k, v in (HI | change).items() if v is not None})
    assert error.param == param
    assert error.status == (404 if change == {"model": "nope"} else 400)


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (COMPLETIONS, {"model": "m"}, "prompt"),
        (COMPLETIONS, {"model": "m", "prompt": []}, "prompt"),
        (COMPLETIONS, {"model": "m", "prompt": [[]]}, "prompt.0"),
        (COMPLETIONS, {"model": "m", "prompt": ["a", 5]}, "prompt.1"),
        (COMPLETIONS, {"model": "m", "prompt": [5, "a"]}, "prompt.1"),
        (COMPLETIONS, {"model": "m", "prompt": [99999]}, "prompt"),
        (COMPLETIONS, {"model": "m", "prompt": [-1]}, "prompt.0"),
        (COMPLETIONS, {"model": "m", "prompt": {"text": "a"}}, "prompt"),
        (COMPLETIONS, {"model": "m", "prompt": ["a"] * 65, "n": 2}, "n"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "logprobs": True}, "logprobs"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "best_of": 200}, "n"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "bad_words": ["b" * 2000]}, "bad_words.0"),
        (GENERATE, {"text": "a", "sampling_params": {"bad_words": ["b"] * 1001}}, "sampling_params.bad_words"),
        (COMPLETIONS, {"model": "m", "prompt": "a", "suffix": "b"}, "suffix"),
        (GENERATE, {}, "text"),
        (GENERATE, {"text": "a", "input_ids": [1]}, "text"),
        (GENERATE, {"input_ids": [99999]}, "input_ids"),
        (GENERATE, {"text": "a", "sampling_params": 5}, "sampling_params"),
        (GENERATE, {"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        (GENERATE, {"text": "a", "sampling_params": {"stop": ["a"] * 17}}, "sampling_params.stop"),
        (GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": "5"}}, "sampling_params.max_new_tokens"),
        (GENERATE, {"text": "a", "top_logprobs_num": 99}, "top_logprobs_num"),
        (GENERATE, {"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        (GENERATE, {"text": "a", "logprob_start_len": 2, "return_logprob": True}, "logprob_start_len"),
        (GENERATE, {"text": "a", "logprob_start_len": -2, "return_logprob": True}, "logprob_start_len"),
        (GENERATE, {"text": "a", "token_ids_logprob": [5]}, "token_ids_logprob"),
        (GENERATE, {"text": "a", "token_ids_logprob": [99999], "return_logprob": True}, "token_ids_logprob"),
        (GENERATE, {"text": "a", "token_ids_logprob": [5] * 129, "return_logprob": True}, "token_ids_logprob"),
    ],
)
def test_what_is_wrong_is_named_elsewhere(endpoint: Endpoint, body: dict[str, Any], param: str) -> None:
    error = refused(endpoint, body)
    assert (error.status, error.param) == (400, param)


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("field", "place"),
    [
        ("tools", lambda value: [{"type": "function", "function": {"name": "f", "parameters": value}}]),
        ("documents", lambda value: [value]),
        ("messages", lambda value: [{"role": "user", "content": "hi", "more": value}]),
        ("chat_template_kwargs", lambda value: value),
        ("json_schema", lambda value: value),
        ("nobody_knows", lambda value: value),
    ],
)
def test_what_is_nested_too_deeply_is_named(field: str, place: Callable[[Any], Any]) -> None:
    for levels in (101, 300, 1000):
        error = refused(CHAT, HI | {field: place(nested(levels))})
        assert (error.status, error.param) == (400, field)
        assert "100 levels" in error.message


def test_nesting_up_to_the_bound_is_taken() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": nested(97)}}
    assert prepare(CHAT, HI | {"tools": [tool], "documents": [nested(99)], "nobody_knows": nested(100)}).jobs


@pytest.mark.parametrize("levels", [99, 400, 1000, 5000])
def test_arguments_of_a_tool_call_may_be_nested_as_they_like(levels: int) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":' * levels + "1" + "}" * levels},
    }
    history = [*HI["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prepare(CHAT, HI | {"messages": history}).jobs


def test_a_chat_that_cannot_fit_never_reaches_the_template() -> None:
    backend = FakeBackend(cards={"m": card(chat_template="{{ raise_exception('reached') }}")})
    for messages in (HI["messages"] * 257, [{"role": "user", "content": "x" * 10**6}]):
        error = refused(CHAT, HI | {"messages": messages}, backend)
        assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert "reached" in refused(CHAT, HI, backend).message


@pytest.mark.parametrize("body", [[], "x", 5, None, True])
def test_a_body_is_an_object(body: Any) -> None:
    assert refused(CHAT, body).status == 400


def test_a_model_may_be_left_out_where_there_is_one() -> None:
    two = FakeBackend(cards={"a": card("a"), "b": card("b")})
    with pytest.raises(ModelNotFound):
        prepare(GENERATE, {"text": "hi"}, two)
    assert prepare(GENERATE, {"text": "hi", "model": "b"}, two).plan.model == "b"


def test_a_model_that_does_not_generate_is_refused() -> None:
    assert refused(CHAT, HI, FakeBackend(cards={"m": card(task="embed")})).param == "model"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ("messages", "model", "n", "stop", "temperature", "seed", "logit_bias", "stream_options", "tools", "tool_choice",
     "response_format", "prompt", "logprobs", "top_logprobs", "max_tokens", "documents", "chat_template_kwargs",
     "text", "input_ids", "sampling_params", "stream")
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(endpoint=st.sampled_from((CHAT, COMPLETIONS, GENERATE)), junk=st.dictionaries(FIELDS, JSON, max_size=3))
def test_no_body_is_a_server_error(endpoint: Endpoint, junk: dict[str, Any]) -> None:
    base: dict[Endpoint, dict[str, Any]] = {
        CHAT: HI,
        COMPLETIONS: {"model": "m", "prompt": "a"},
        GENERATE: {"text": "a"},
    }
    try:
        prepared = prepare(endpoint, base[endpoint] | junk)
    except (InvalidRequest, ModelNotFound):
        return
    assert all(job.input_ids for job in prepared.jobs)
