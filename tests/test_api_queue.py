"""The api in front of real processes: queue, scripted worker, detokenizer; replicas that die, clients that leave."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import openai
import orjson
import pytest
import redis
from conftest import Server
from kit.deployment import Deployment, terminate
from kit.tokenizers import byte_level

TEXT = "Grüße, 世界! 🌶 END and more"
HI: list[Any] = [{"role": "user", "content": "hi"}]


def scripts() -> list[dict[str, Any]]:
    tokens = byte_level().spelled(TEXT)
    return [
        {"when": "fail", "steps": [[tokens[0]]] * 3, "step_ms": 300, "fail": 'the engine broke: "x"'},
        {"when": "endless", "tokens": 400, "tokens_per_s": 20},
        {"when": "slow", "steps": [[token] for token in tokens], "finish": "stop", "step_ms": 40},
        {"steps": [tokens[i : i + 3] for i in range(0, len(tokens), 3)], "finish": "stop"},
    ]


class Replica:
    """An api replica on a port of its own."""

    def __init__(self, deployment: Deployment, *flags: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = deployment.start("api", "--fd", "-1", "--port", str(port), *flags)
        self.http = httpx.Client(base_url=self.url, timeout=60, trust_env=False)
        wait_until(self.answers, "the replica does not answer")

    def close(self) -> None:
        self.http.close()

    def answers(self) -> bool:
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False


def wait_until(check: Callable[[], Any], what: str) -> Any:
    for _ in range(1200):
        if value := check():
            return value
        time.sleep(0.05)
    raise AssertionError(what)


def chat(content: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


def text_of(blocks: list[str]) -> str:
    """The text that the events of a streamed chat spell."""
    out = ""
    for block in blocks:
        data = block.split("data: ", 1)[1]
        for choice in orjson.loads(data)["choices"] if data != "[DONE]" else ():
            out += choice["delta"].get("content", "")
    return out


@pytest.fixture(scope="module")
def deployment(redis_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(redis_server.url, tmp_path_factory.mktemp("api"), scripts()) as deployment:
        deployment.start("worker")
        deployment.start("detok")
        yield deployment


@pytest.fixture(scope="module")
def http(deployment: Deployment) -> Iterator[httpx.Client]:
    """A client of a replica that lives as long as the module."""
    with closing(Replica(deployment, "--resume-grace-s", "0.2")) as replica:
        yield replica.http


@pytest.fixture
def store(redis_server: Server) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


def unfinished(store: redis.Redis) -> int:
    """Requests that have not reached their end."""
    return sum(int(store.zcard(key)) for key in store.scan_iter("hr:*:act"))


def test_answers_and_streams_say_the_same(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        whole = sdk.chat.completions.create(model="m", messages=HI, n=3)
        assert [choice.message.content for choice in whole.choices] == [TEXT] * 3
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 3 * len(TEXT.encode())
        stopped = sdk.chat.completions.create(model="m", messages=HI, stop=["END"])
        assert stopped.choices[0].message.content == TEXT.partition("END")[0]
        assert stopped.choices[0].finish_reason == "stop"
        short = sdk.completions.create(model="m", prompt="hi", max_tokens=4)
        assert (short.choices[0].text, short.choices[0].finish_reason) == ("Grü", "length")
        streamed = {0: "", 1: ""}
        for chunk in sdk.chat.completions.create(
            model="m", messages=HI, n=2, stream=True, stop="END", stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
            if chunk.usage is not None:
                assert stopped.usage is not None
                assert chunk.usage.completion_tokens == 2 * stopped.usage.completion_tokens
        assert list(streamed.values()) == [TEXT.partition("END")[0]] * 2


def test_what_the_worker_reports_reaches_the_client(http: httpx.Client) -> None:
    assert http.get("/health_generate").status_code == 200
    failed = http.post("/v1/chat/completions", json=chat("fail"))
    assert failed.status_code == 500
    assert failed.json()["error"]["message"] == 'the engine broke: "x"'
    events = http.post("/v1/chat/completions", json=chat("fail", stream=True)).text.split("\n\n")
    assert orjson.loads(events[-3].removeprefix("data: "))["error"]["message"] == 'the engine broke: "x"'
    assert events[-2] == "data: [DONE]"


def test_another_replica_goes_on_where_a_dead_one_stopped(deployment: Deployment) -> None:
    first, second = Replica(deployment), Replica(deployment)
    body = chat("slow", stream=True)
    blocks: list[str] = []
    with first.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for block in sse(answer):
            blocks.append(block)
            if len(blocks) == 12:
                first.process.kill()
                break
    last = blocks[-1].split("\n")[0].removeprefix("id: ")
    with second.http.stream("POST", "/v1/chat/completions", json=body, headers={"Last-Event-ID": last}) as answer:
        assert answer.status_code == 200
        rest = list(sse(answer))
    assert text_of(blocks + rest) == TEXT
    again = second.http.get(f"/v1/streams/{last.partition(':')[0]}", headers={"Last-Event-ID": last})
    assert [block for block in again.text.split("\n\n") if block] == rest
    first.close()
    second.close()


def sse(answer: httpx.Response) -> Iterator[str]:
    """Events as they come."""
    pending = ""
    for piece in answer.iter_text():
        *done, pending = (pending + piece).split("\n\n")
        yield from (block for block in done if not block.startswith(":"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_place(
    deployment: Deployment, http: httpx.Client, store: redis.Redis, stream: bool
) -> None:
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=chat("endless", stream=True)) as answer:
            next(sse(answer))
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=chat("endless"), timeout=1.0)
    wait_until(lambda: unfinished(store) == 0, "the request goes on without its client")
    assert " ERROR " not in deployment.logs().partition("-- worker")[0]


def test_a_client_may_come_back_within_the_grace(http: httpx.Client) -> None:
    body, path = chat("slow", stream=True), "/v1/chat/completions"
    with http.stream("POST", path, json=body, headers={"X-Resume-Grace": "20"}) as answer:
        first = next(sse(answer))
    time.sleep(0.5)  # longer than this replica's own grace
    last = first.split("\n")[0].removeprefix("id: ")
    rest = http.post(path, json=body, headers={"Last-Event-ID": last}).text.split("\n\n")
    assert text_of([first, *filter(None, rest)]) == TEXT


def test_sigterm_lets_open_streams_finish(deployment: Deployment) -> None:
    with (
        closing(Replica(deployment)) as replica,
        replica.http.stream("POST", "/v1/chat/completions", json=chat("slow", stream=True)) as answer,
    ):
        events = sse(answer)
        blocks = [next(events)]
        replica.process.send_signal(signal.SIGTERM)
        blocks += events
        assert text_of(blocks) == TEXT
        assert replica.process.wait(30) == 0


def test_a_second_sigterm_ends_at_once(deployment: Deployment) -> None:
    with (
        closing(Replica(deployment)) as replica,
        replica.http.stream("POST", "/v1/chat/completions", json=chat("endless", stream=True)) as answer,
    ):
        events = sse(answer)
        next(events)
        replica.process.send_signal(signal.SIGTERM)
        for _ in range(10):  # the stream goes on
            next(events)
        assert terminate(replica.process) == 0


def test_what_is_wrong_at_start_is_said_in_one_line(deployment: Deployment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wrong = {
            f"cannot listen on 127.0.0.1:{port}": ("--fd", "-1", "--port", port),
            "--chat-template": ("--chat-template", "/nowhere.jinja"),
            "/proc/nowhere": ("--data-dir", "/proc/nowhere"),
            "--log-level": ("--log-level", "loud"),
        }
        first = len(list(deployment.folder.glob("*.log")))
        processes = [deployment.start("api", *flags) for flags in wrong.values()]
        for i, (words, process) in enumerate(zip(wrong, processes, strict=True)):
            assert process.wait(60) == 2
            said = (deployment.folder / f"api-{first + i}.log").read_text()
            assert words in said
            assert said.count("\n") == 1
