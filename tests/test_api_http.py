"""The api over HTTP: bodies and events that the openai package reads, errors, keys, health."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import openai
import orjson
import pytest
from headrace.api.auth import ADMIN_PATHS
from headrace.api.settings import ApiSettings
from headrace.shared.chunks import Finish, TextLogprob
from headrace.shared.control import Outcome
from headrace.shared.errors import Overloaded, StoreUnavailable, Unavailable
from headrace.shared.messages import GenerateJob
from headrace.shared.overview import COUNTERS
from headrace.shared.registry import ProcessInfo
from kit.fake_backend import FakeBackend, Step, app, card, say
from kit.loopback import serve
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": "m", "messages": HI}


class Api:
    """A running api and its fake backend."""

    def __init__(self, url: str, backend: FakeBackend) -> None:
        self.url = url
        self.backend = backend
        self.sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def close(self) -> None:
        self.http.close()
        self.sdk.close()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        return self.http.post(path, content=orjson.dumps(body), headers=headers)

    def error(self, path: str, body: Any, status: int) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == status, answer.text
        return error_of(answer)

    def events(self, path: str, body: Any, **headers: str) -> list[tuple[str | None, Any]]:
        answer = self.post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        return events_of(answer.text)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, in OpenAI's shape and no other."""
    body = answer.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    error: dict[str, Any] = body["error"]
    assert "site-packages" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


def events_of(text: str) -> list[tuple[str | None, Any]]:
    """(id, data) of each event; the last one is [DONE]."""
    out: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n")[:-1]:
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        event_id = lines[0].removeprefix("id: ") if len(lines) == 2 else None
        data = lines[-1].removeprefix("data: ")
        out.append((event_id, data if data == "[DONE]" else orjson.loads(data)))
    assert out[-1] == (None, "[DONE]")
    return out[:-1]


@pytest.fixture(scope="module")
def running() -> Iterator[Api]:
    backend = FakeBackend()
    with serve(app(backend)) as url, closing(Api(url, backend)) as api:
        yield api


@pytest.fixture
def api(running: Api) -> Api:
    running.backend.script = lambda job, choice: say("Hello", " world")
    running.backend.error = None
    running.backend.cards = {"m": card()}
    running.backend.jobs.clear()
    return running


def test_a_chat_is_what_the_sdk_expects(api: Api) -> None:
    raw = api.post("/v1/chat/completions", CHAT | {"n": 2})
    answer = ChatCompletion.model_validate(raw.json(), strict=True)
    assert answer.id.startswith("chatcmpl-")
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.usage is not None
    prompt = len(api.backend.jobs[-1].input_ids)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        prompt,
        4,
        prompt + 4,
    )
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.system_fingerprint


def test_a_streamed_chat_comes_in_order(api: Api) -> None:
    api.backend.script = lambda job, choice: say("Hel", "lo", " world") if choice == 0 else say("Hi")
    body = CHAT | {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [
        ChatCompletionChunk.model_validate(data, strict=True) for _, data in api.events("/v1/chat/completions", body)
    ]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
    seen = [(c.choices[0].index, c.choices[0].delta.role, c.choices[0].delta.content, c.choices[0].finish_reason)
            for c in chunks[:-1]]  # fmt: skip
    assert seen == [
        (0, "assistant", "", None), (1, "assistant", "", None),
        (0, None, "Hel", None), (1, None, "Hi", None), (1, None, None, "stop"),
        (0, None, "lo", None), (0, None, " world", None), (0, None, None, "stop"),
    ]  # fmt: skip
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert all("finish_reason" in chunk.choices[0].model_fields_set for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_obfuscation": False}])
def test_there_is_no_usage_chunk_unless_it_is_asked_for(api: Api, options: dict[str, bool] | None) -> None:
    body = CHAT | {"stream": True} | ({} if options is None else {"stream_options": options})
    assert all("usage" not in data and data["choices"] for _, data in api.events("/v1/chat/completions", body))


def test_usage_may_come_with_every_chunk(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    usages = [
        data["usage"]
        for _, data in api.events("/v1/chat/completions", CHAT | {"stream": True, "stream_options": options})
    ]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 2, 2]


def test_a_stream_says_what_the_whole_answer_says(api: Api) -> None:
    api.backend.script = lambda job, choice: say("世", "", "界", "!", finish=Finish("length"))
    whole = api.sdk.chat.completions.create(model="m", messages=HI)
    text, reasons = "", []
    for chunk in api.sdk.chat.completions.create(model="m", messages=HI, stream=True):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert text == whole.choices[0].message.content == "世界!"
    assert reasons[-1] == whole.choices[0].finish_reason == "length"
    assert reasons[:-1] == [None] * (len(reasons) - 1)


def entry(token: str, data: bytes, *top: tuple[str, float]) -> TextLogprob:
    tops = tuple(TextLogprob(i, name, tuple(name.encode()), value) for i, (name, value) in enumerate(top))
    return TextLogprob(7, token, tuple(data), -0.5, tops)


def half_characters(job: GenerateJob, choice: int) -> list[Step]:
    """é in two tokens, then two tokens in one chunk."""
    return [
        Step("", logprobs=(entry("\ufffd", b"\xc3", ("a", -1.0), ("b", -2.0)),)),
        Step("éxy", 3, logprobs=(entry("\ufffd", b"\xa9", ("c", -1.0)), entry("x", b"x"), entry("y", b"y"))),
        Step("z", finish=Finish("stop"), logprobs=(entry("z", b"z"),)),
    ]


def test_chat_logprobs_name_every_token_once(api: Api) -> None:
    api.backend.script = half_characters
    asked: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    whole = ChatCompletion.model_validate(api.post("/v1/chat/completions", CHAT | asked).json(), strict=True)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content or []
    assert [token.bytes for token in content] == [[0xC3], [0xA9], [0x78], [0x79], [0x7A]]
    assert [[top.token for top in token.top_logprobs] for token in content] == [["a", "b"], ["c"], [], [], []]
    streamed = []
    for _, data in api.events("/v1/chat/completions", CHAT | asked | {"stream": True}):
        logprobs = ChatCompletionChunk.model_validate(data, strict=True).choices[0].logprobs
        streamed += (logprobs.content or []) if logprobs else []
    assert [token.model_dump() for token in streamed] == [token.model_dump() for token in content]


def test_completion_logprobs_have_real_offsets(api: Api) -> None:
    api.backend.script = half_characters
    body = {"model": "m", "prompt": "The ", "logprobs": 1}
    whole = Completion.model_validate(api.post("/v1/completions", body).json(), strict=True).choices[0].logprobs
    assert whole is not None
    assert whole.text_offset == [0, 0, 1, 2, 3]
    assert whole.tokens == ["\ufffd", "\ufffd", "x", "y", "z"]
    assert whole.token_logprobs == [-0.5] * 5
    offsets: list[int] = []
    for _, data in api.events("/v1/completions", body | {"stream": True}):
        offsets += data["choices"][0]["logprobs"]["text_offset"]
    assert offsets == whole.text_offset


def scored(job: GenerateJob, choice: int) -> list[Step]:
    """Logprobs of a prompt "The é", whose é is two tokens, after a BOS."""
    bos = TextLogprob(0, "<s>", tuple(b"<s>"), None)
    prompt = (bos, entry("The ", b"The ", ("a", -1.0)), entry("\ufffd", b"\xc3"), entry("\ufffd", b"\xa9"))
    if job.sampling.max_new_tokens == 0:
        return [Step("", 0, Finish("length"), prompt_logprobs=prompt)]
    return [
        Step("", prompt_logprobs=prompt, logprobs=(entry("x", b""),)),
        Step("xz", finish=Finish("stop"), logprobs=(entry("z", b"xz"),)),
    ]


@pytest.mark.parametrize("tokens", [0, 7])
def test_echo_with_logprobs_tells_of_the_prompt_too(api: Api, tokens: int) -> None:
    api.backend.script = scored
    body = {"model": "m", "prompt": "The é", "logprobs": 1, "echo": True, "max_tokens": tokens}
    choice = api.post("/v1/completions", body).json()["choices"][0]
    more = [5, 5] if tokens else []
    assert choice["text"] == ("The éxz" if tokens else "The é")
    assert choice["logprobs"]["text_offset"] == [0, 0, 4, 4, *more]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, *[-0.5] * len(more)]
    assert choice["logprobs"]["tokens"][:2] == ["<s>", "The "]
    assert choice["logprobs"]["top_logprobs"][:2] == [{}, {"a": -1.0}]
    assert api.backend.jobs[-1].logprob_start_len == 0
    lists: dict[str, list[Any]] = {}
    for _, data in api.events("/v1/completions", body | {"stream": True}):
        for name, values in data["choices"][0]["logprobs"].items():
            lists.setdefault(name, []).extend(values)
    assert lists == choice["logprobs"]


def test_native_logprobs_of_prompt_and_named_tokens(api: Api) -> None:
    named = (TextLogprob(9, "n", (110,), -3.0),)
    first, second = (TextLogprob(i, "t", (116,), lp) for i, lp in ((1, None), (2, -0.5)))
    api.backend.script = lambda job, choice: [
        Step(
            "a",
            1,
            Finish("stop"),
            (dataclasses.replace(second, asked=named),),
            (first, dataclasses.replace(second, asked=named)),
        )
    ]
    body = {"text": "ab", "return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [9]}
    for meta in (
        api.post("/generate", body).json()["meta_info"],
        next(iter(api.events("/generate", body | {"stream": True})))[1]["meta_info"],
    ):
        assert meta["input_token_logprobs"] == [[None, 1, "t"], [-0.5, 2, "t"]]
        assert meta["input_token_ids_logprobs"] == [None, [[-3.0, 9, "n"]]]
        assert meta["output_token_logprobs"] == [[-0.5, 2, "t"]]
        assert meta["output_token_ids_logprobs"] == [[[-3.0, 9, "n"]]]
        assert "input_top_logprobs" not in meta
    job = api.backend.jobs[-1]
    assert (job.logprob_start_len, job.token_ids_logprob) == (0, (9,))


def test_logprobs_zero_show_the_chosen_token_alone(api: Api) -> None:
    api.backend.script = half_characters
    answer = api.post("/v1/completions", {"model": "m", "prompt": "a", "logprobs": 0}).json()
    assert answer["choices"][0]["logprobs"]["top_logprobs"] is None


def test_completions_of_many_prompts(api: Api) -> None:
    api.backend.script = lambda job, choice: say(f"{len(job.input_ids)}{'ab'[choice]}")
    answer = api.sdk.completions.create(model="m", prompt=["~", "~~"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "1a"), (1, "1b"), (2, "2a"), (3, "2b")]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    streamed: dict[int, str] = {}
    for chunk in api.sdk.completions.create(model="m", prompt=["~", "~~"], n=2, stream=True):
        Completion.model_validate(chunk.model_dump())
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert streamed == {0: "1a", 1: "1b", 2: "2a", 3: "2b"}


@pytest.mark.parametrize("prompt", ["San ", [83, 97, 110, 32]])
def test_echo_repeats_the_prompt(api: Api, prompt: Any) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 7, "echo": True}
    assert api.post("/v1/completions", body).json()["choices"][0]["text"] == "San Hello world"
    texts = [data["choices"][0]["text"] for _, data in api.events("/v1/completions", body | {"stream": True})]
    assert texts == ["San Hello", " world"]


def test_best_of_shows_the_likeliest(api: Api) -> None:
    means = [-3.0, -0.5, -2.0, -1.0]

    def script(job: GenerateJob, choice: int) -> list[Step]:
        told = tuple(TextLogprob(7, "t", (116,), means[choice]) for _ in range(choice + 1))
        return [Step("abcd"[choice], choice + 1, Finish("stop"), told)]

    api.backend.script = script
    body: dict[str, Any] = {"model": "m", "prompt": ["~", "~~"], "n": 2, "best_of": 4}
    answer = Completion.model_validate(api.post("/v1/completions", body).json(), strict=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "b"), (1, "d"), (2, "b"), (3, "d")]
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 20)
    native = api.post("/generate", {"text": "~", "sampling_params": {"best_of": 4}}).json()
    assert native["text"] == "b"
    assert "output_token_logprobs" not in native["meta_info"]
    shown = api.post("/v1/completions", body | {"logprobs": 0}).json()["choices"]
    assert [choice["logprobs"]["token_logprobs"] for choice in shown[:2]] == [[-0.5] * 2, [-1.0] * 4]


def test_echo_of_no_tokens_needs_no_worker(api: Api) -> None:
    answer = api.post("/v1/completions", {"model": "m", "prompt": "San ", "max_tokens": 0, "echo": True}).json()
    assert answer["choices"][0]["text"] == "San "
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert api.backend.jobs == []


def test_the_native_route_streams_cumulative_text_or_deltas(api: Api) -> None:
    body: dict[str, Any] = {"text": "a", "stream": True}
    whole = [data for _, data in api.events("/generate", body)]
    assert [data["text"] for data in whole] == ["Hello", "Hello world"]
    assert whole[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert whole[0]["meta_info"]["finish_reason"] is None
    assert whole[-1]["output_ids"] == [0, 1]
    deltas = [data for _, data in api.events("/generate", body | {"incremental_streaming_output": True})]
    assert [data["text"] for data in deltas] == ["Hello", " world"]
    assert [data["output_ids"] for data in deltas] == [[0], [1]]


def test_the_native_route_answers_one_or_many(api: Api) -> None:
    one = api.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}).json()
    assert one["text"] == "Hello world"
    assert one["meta_info"]["completion_tokens"] == 2
    many = api.post("/generate", {"text": ["a", "b"], "sampling_params": {"n": 2}}).json()
    assert [item["text"] for item in many] == ["Hello world"] * 4
    events = api.events("/generate", {"text": ["a", "b"], "stream": True})
    assert [data["index"] for _, data in events] == [0, 1, 0, 1]


def test_a_stop_that_matched_is_named(api: Api) -> None:
    api.backend.script = lambda job, choice: say("x", finish=Finish("stop", matched="END"))
    assert api.post("/generate", {"text": "a"}).json()["meta_info"]["finish_reason"]["matched"] == "END"
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "m", "prompt": "a"})):
        assert api.post(path, body).json()["choices"][0]["matched_stop"] == "END"
        choices = [event["choices"][0] for _, event in api.events(path, body | {"stream": True})]
        assert [choice.get("matched_stop") for choice in choices] == [None] * (len(choices) - 1) + ["END"]


def test_headers_of_a_stream(api: Api) -> None:
    answer = api.post("/v1/chat/completions", CHAT | {"stream": True, "zeal": 1}, **{"X-Request-Id": "mine-1"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-ignored-fields"] == "zeal"
    assert "content-length" not in answer.headers


def test_a_request_id_is_made_where_there_is_none_that_is_safe(api: Api) -> None:
    for given in ({}, {"X-Request-Id": "x" * 200}, {"X-Request-Id": "a b"}):
        answer = api.http.get("/v1/models", headers=given)
        assert answer.headers["x-request-id"].startswith("req_")
    assert api.post("/v1/chat/completions", {}, **{"X-Request-Id": "e1"}).headers["x-request-id"] == "e1"


def test_an_error_before_the_first_token_has_a_status(api: Api) -> None:
    api.backend.script = lambda job, choice: [Step("", finish=Finish("error", message='bad "x"', status=400))]
    for stream in (False, True):
        error = api.error("/v1/chat/completions", CHAT | {"stream": stream}, 400)
        assert (error["message"], error["code"]) == ('bad "x"', "generation_failed")


def test_an_error_in_the_middle_is_an_event(api: Api) -> None:
    api.backend.script = lambda job, choice: [
        Step("a"),
        Step("", finish=Finish("error", message='bad "x"\n\n', status=500)),
    ]
    events = api.events("/v1/chat/completions", CHAT | {"stream": True})
    assert events[-1][1] == {
        "error": {"message": 'bad "x"\n\n', "type": "server_error", "param": None, "code": "generation_failed"}
    }
    with pytest.raises(openai.APIError, match="bad"):
        list(api.sdk.chat.completions.create(model="m", messages=HI, stream=True))


def test_a_request_that_was_cancelled_from_outside_says_so(api: Api) -> None:
    api.backend.script = lambda job, choice: [Step("a"), Step("", finish=Finish("abort", message="stopped"))]
    assert api.error("/v1/completions", {"model": "m", "prompt": "a"}, 499)["code"] == "request_cancelled"


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (Overloaded("full", retry_after_s=7), 429, "queue_full"),
        (Unavailable("down"), 503, "service_unavailable"),
        (StoreUnavailable("redis://secret@host"), 503, "service_unavailable"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_what_the_queue_refuses(api: Api, raised: Exception, status: int, code: str) -> None:
    api.backend.error = raised
    for stream in (False, True):
        answer = api.post("/v1/chat/completions", CHAT | {"stream": stream})
        assert answer.status_code == status
        assert error_of(answer)["code"] == code
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"]
        assert answer.headers.get("retry-after") == {429: "7", 503: "1"}.get(status)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"model": "m", "messages"',
        b"\xff",
        b'{"temperature": NaN}',
        b'{"temperature": 1e999}',
        b'"\\ud800"',
    ],
)
def test_a_body_that_is_no_json(api: Api, content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        answer = api.http.post(path, content=content)
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "invalid_json"


def test_a_client_that_goes_within_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    half = [{"type": "http.request", "body": b'{"model"', "more_body": True}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return half.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    asyncio.run(app(FakeBackend())(scope, receive, send))
    assert sent[0]["status"] == 499
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def test_what_the_framework_refuses_has_the_same_shape(api: Api) -> None:
    assert error_of(api.http.get("/nope"))["message"] == "Unknown route: GET /nope"
    answer = api.http.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert error_of(answer)
    assert answer.headers["allow"] == "POST"


def test_a_body_that_is_too_large() -> None:
    with (
        serve(app(FakeBackend(), ApiSettings(max_body_mb=1))) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        big = b'{"model": "' + b"x" * (1 << 20) + b'"}'
        for content in (big, (big[i : i + 65536] for i in range(0, len(big), 65536))):
            answer = http.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "request_too_large"


def test_models(api: Api) -> None:
    api.backend.cards = {"m": card(), "org/other": card("org/other")}
    assert [model.id for model in api.sdk.models.list()] == ["m", "org/other"]
    assert api.sdk.models.retrieve("org/other").created == 1_700_000_000
    answer = api.http.get("/v1/models/nope")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        api.sdk.chat.completions.create(model="nope", messages=HI)


@pytest.mark.parametrize(
    ("processes", "status", "reason"),
    [
        ([], 503, "no worker and no detok is ready"),
        ([ProcessInfo("worker", state="ready")], 503, "no detok is ready"),
        ([ProcessInfo("worker", state="starting"), ProcessInfo("detok", state="ready")], 503, "no worker is ready"),
        ([ProcessInfo("worker", state="ready"), ProcessInfo("detok", state="ready")], 200, None),
    ],
)
def test_health_says_whether_a_request_would_succeed(
    api: Api, processes: list[ProcessInfo], status: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.backend, "alive_processes", processes)
    answer = api.http.get("/health")
    assert answer.status_code == status
    assert answer.json().get("reason") == reason


def test_health_generate_sends_a_token_through(api: Api) -> None:
    assert api.http.get("/health_generate").json() == {"status": "ok", "model": "m"}
    (job,) = api.backend.jobs
    assert (job.lane, job.sampling.max_new_tokens) == ("rt", 1)
    api.backend.script = lambda job, choice: [Step("", finish=Finish("error", message="broken"))]
    assert api.http.get("/health_generate").status_code == 503
    assert api.http.get("/health_generate?model=nope").status_code == 503


def test_server_info_lists_the_processes(api: Api) -> None:
    info = api.http.get("/server_info").json()
    assert [process["role"] for process in info["processes"]] == ["worker", "detok"]
    assert {"role", "id", "host", "pid", "model", "state", "started_at"} <= info["processes"][0].keys()


def test_metrics_count_what_happened(api: Api) -> None:
    def value(name: str) -> float:
        lines = [line for line in api.http.get("/metrics").text.splitlines() if line.startswith(name)]
        return math.fsum(float(line.rpartition(" ")[2]) for line in lines)

    before = [
        value(n) for n in ("headrace_generation_tokens_total", 'headrace_requests_total{endpoint="/v1/completions"')
    ]
    prompts = value("headrace_prompt_tokens_total")
    api.sdk.completions.create(model="m", prompt="~~~", n=2)
    assert value("headrace_generation_tokens_total") == before[0] + 4
    assert value('headrace_requests_total{endpoint="/v1/completions"') == before[1] + 1
    assert value("headrace_prompt_tokens_total") == prompts + 3
    assert value("headrace_open_requests") == 0
    assert value("headrace_time_to_first_token_seconds_count") > 0


def test_metrics_show_the_queue_and_what_was_refused(api: Api) -> None:
    def samples() -> dict[tuple[str, ...], float]:
        families = text_string_to_metric_families(api.http.get("/metrics").text)
        return {(s.name, *sorted(s.labels.values())): s.value for family in families for s in family.samples}

    before = samples()
    assert before["headrace_queue_waiting", "m", "std"] == len(api.backend.jobs)
    assert before["headrace_queue_oldest_seconds", "batch", "m"] == 0
    assert before["headrace_shards", "leased"] == 2
    assert {f"headrace_queue_{name}_total" for name in COUNTERS} <= {name for name, *_ in before}
    api.backend.error = Overloaded("full", retry_after_s=7)
    try:
        api.http.post("/v1/completions", json={"model": "m", "prompt": "x"})
    finally:
        api.backend.error = None
    after = samples()
    refused = "headrace_refused_requests_total", "queue_full"
    assert after[refused] == before.get(refused, 0) + 1
    assert after["headrace_requests_total", "/v1/completions", "m", "refused"] >= 1


def test_the_document_describes_the_bodies(api: Api) -> None:
    document = api.http.get("/openapi.json").json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert "messages" in document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    text = orjson.dumps(document).decode()
    for name in text.split("#/components/schemas/")[1:]:
        assert name.split('"')[0] in document["components"]["schemas"]


KEYED = ApiSettings(api_key=("plain", "acme:sk-a:b"), admin_key="root")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Api]:
    backend = FakeBackend()
    with serve(app(backend, KEYED)) as url, closing(Api(url, backend)) as api:
        yield api


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/server_info", "/health_generate", "/docs", "/nope"])
@pytest.mark.parametrize(
    "headers", [{}, bearer("wrong"), {"Authorization": "Basic plain"}, {"Authorization": "plain"}, bearer("acme")]
)
def test_a_key_guards_every_route(keyed: Api, path: str, headers: dict[str, str]) -> None:
    answer = keyed.http.get(path, headers=headers)
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert keyed.http.get("/health", headers=headers).status_code == 200


def test_a_key_may_hold_any_character() -> None:
    with (
        serve(app(FakeBackend(), ApiSettings(api_key=("t:schlüssel-世",)))) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        for key, status in (("schlüssel-世", 200), ("schlüssel", 401)):
            headers = [(b"authorization", b"Bearer " + key.encode())]
            assert http.get("/v1/models", headers=headers).status_code == status


def test_keys_stand_for_tenants_and_the_admin_key_for_control(keyed: Api) -> None:
    tenants = []
    for key in ("plain", "sk-a:b", "root"):
        assert keyed.post("/v1/completions", {"model": "m", "prompt": "a"}, **bearer(key)).status_code == 200
        tenants.append(keyed.backend.jobs[-1].tenant)
    assert tenants[1:] == ["acme", "default"]
    assert tenants[0].startswith("key-")
    assert keyed.http.get("/server_info", headers=bearer("plain")).status_code == 401
    assert keyed.http.get("/server_info", headers=bearer("root")).status_code == 200
    for path in ADMIN_PATHS - {"/server_info", "/model_info"}:
        assert keyed.post(path, {}, **bearer("sk-a:b")).status_code == 401, path
        assert keyed.post(path, {}, **bearer("root")).status_code in (200, 400), path  # what is missing is said
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="bad", max_retries=0) as sdk, \
            pytest.raises(openai.AuthenticationError):  # fmt: skip
        sdk.models.list()


def test_workers_that_refuse_are_told_apart(api: Api) -> None:
    one, two = (ProcessInfo("worker", state="ready", model="m", host=host, pid=7) for host in ("a", "b"))
    api.backend.alive_processes[:] = [one, two]
    api.backend.obey = lambda worker, kind: Outcome(worker.id, 400, "no such folder", "model_path")
    alike = api.error("/update_weights_from_disk", {"model_path": "/w"}, 400)
    assert (alike["message"], alike["param"]) == ("No such folder.", "model_path")
    assert [kind for _, kind, _ in api.backend.commands[-2:]] == ["read_weights", "discard"]
    api.backend.obey = lambda worker, kind: Outcome(worker.id, 400 if worker.host == "b" else 200, "it is full")
    assert api.error("/update_weights_from_disk", {"model_path": "/w"}, 400)["message"] == "Worker b:7: it is full."
    api.backend.obey = lambda worker, kind: Outcome(worker.id)
    assert api.post("/update_weights_from_disk", {"model_path": "/w/v2"}).status_code == 200
    assert api.backend.commands[-1][2]["version"] == "v2"
    api.backend.alive_processes[:] = [replace(one, state="ready"), ProcessInfo("detok", state="ready")]


def test_an_adapter_needs_no_choice_of_model(api: Api) -> None:
    api.backend.cards |= {"style": card("style", pool="m", lora="/adapters/style")}
    assert api.post("/generate", {"text": "a"}).status_code == 200
    assert api.backend.jobs[-1].model == "m"
    assert api.post("/v1/completions", {"model": "style", "prompt": "a"}).status_code == 200
    assert (api.backend.jobs[-1].model, api.backend.jobs[-1].pool) == ("style", "m")
    shown = {model["id"]: model["parent"] for model in api.http.get("/v1/models").json()["data"]}
    assert shown == {"m": None, "style": "m"}
    assert "/adapters" not in api.http.get("/model_info?model=style").text
