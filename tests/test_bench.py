"""`headrace bench`: its parts by their properties, and the whole against a real server on loopback."""

from __future__ import annotations

import asyncio
import itertools
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from headrace.deploy.bench import main
from headrace.deploy.bench.client import Client
from headrace.deploy.bench.load import closed_loop, open_loop, poisson_arrivals
from headrace.deploy.bench.prompts import UNIQUE_WORDS, WORDS, PromptSource
from headrace.deploy.bench.requests import read_answer, read_failure, request_body
from headrace.deploy.bench.results import Distribution, summarize
from headrace.deploy.bench.samples import Sample
from headrace.deploy.bench.settings import BenchSettings
from headrace.deploy.bench.sse import SseParser
from headrace.shared.errors import ConfigError
from headrace.shared.settings import load
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.fake_openai import FakeOpenAI, fake_openai

times = st.floats(0, 1e4, allow_nan=False)


def bench_settings(*argv: str) -> BenchSettings:
    return load(BenchSettings, argv, "headrace bench")


# prompts


def test_words_are_distinct_and_plain() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isascii() and word.isalpha() for word in WORDS)


@given(
    seed=st.integers(0, 2**32),
    indices=st.lists(st.integers(0, len(WORDS) ** UNIQUE_WORDS - 1), min_size=2, max_size=20, unique=True),
    shared=st.integers(0, 40),
    tail=st.integers(0, 40),
)
def test_prompts_differ_right_after_the_shared_prefix(seed: int, indices: list[int], shared: int, tail: int) -> None:
    source = PromptSource(words=shared + UNIQUE_WORDS + tail, shared_prefix=shared, seed=seed)
    prompts = [source.prompt(i).split(" ") for i in indices]
    assert all(len(p) == shared + UNIQUE_WORDS + tail and set(p) <= set(WORDS) for p in prompts)
    assert len({tuple(p[:shared]) for p in prompts}) == 1
    assert len({tuple(p[shared : shared + UNIQUE_WORDS]) for p in prompts}) == len(prompts)


def test_prompts_are_the_seeds() -> None:
    one, again, other = (PromptSource(words=50, shared_prefix=10, seed=s) for s in (1, 1, 2))
    assert [one.prompt(i) for i in range(20)] == [again.prompt(i) for i in range(20)]
    assert {one.prompt(i) for i in range(20)}.isdisjoint(other.prompt(i) for i in range(20))


# arrivals


@given(rate=st.floats(0.01, 1000), count=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_arrivals_ascend_and_repeat_with_their_seed(rate: float, count: int, seed: int) -> None:
    arrivals = poisson_arrivals(rate, count, seed)
    assert len(arrivals) == count
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals == poisson_arrivals(rate, count, seed)


def test_arrivals_come_at_their_rate_with_exponential_gaps() -> None:
    arrivals = [0.0, *poisson_arrivals(20.0, 20_000, seed=7)]
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert spread == pytest.approx(mean, rel=0.05)  # exponential: the standard deviation is the mean


# server-sent events

payloads = st.lists(
    st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1), max_size=8
)


@given(data=st.data(), texts=payloads, end=st.sampled_from(["\n", "\r\n"]), space=st.sampled_from(["", " "]))
def test_events_survive_any_cut(data: st.DataObject, texts: list[str], end: str, space: str) -> None:
    texts = [text.removeprefix(" ") or "x" for text in texts]
    space = space or (" " if any(text.startswith(" ") for text in texts) else "")
    wire = "".join(f": ping{end}event: m{end}data:{space}{text}{end}{end}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=6)))
    parser = SseParser()
    got = [event for a, b in itertools.pairwise([0, *cuts, len(wire)]) for event in parser.feed(wire[a:b])]
    assert got == [text.encode() for text in texts]


def test_data_lines_of_one_event_are_joined() -> None:
    assert SseParser().feed(b'data: {"a":\ndata: 1}\n\ndata: [DONE]\n\ndata: unfinished') == [b'{"a":\n1}', b"[DONE]"]


# requests and answers


def test_request_body_of_each_route() -> None:
    completions = orjson.loads(request_body(bench_settings("--ignore-eos", "--output-len", "9"), "m", "one two"))
    assert completions == {
        "model": "m",
        "prompt": "one two",
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    chat = orjson.loads(request_body(bench_settings("--endpoint", "chat", "--no-stream"), "m", "one two"))
    assert chat["messages"] == [{"role": "user", "content": "one two"}]
    assert chat["stream"] is False
    assert "stream_options" not in chat


def test_extra_body_replaces_and_removes() -> None:
    extra = '{"temperature": 0.7, "stream_options": null, "generation_config": "{\\"eos_token_id\\": -1}"}'
    body = orjson.loads(request_body(bench_settings("--extra-body", extra), "m", "p"))
    assert body["temperature"] == 0.7
    assert "stream_options" not in body
    assert body["generation_config"] == '{"eos_token_id": -1}'


@pytest.mark.parametrize(
    ("payload", "has_text"),
    [
        (b'{"choices":[{"text":"a"}]}', True),
        (b'{"choices":[{"text":""}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"content":"a"}}]}', True),
        (b'{"choices":[{"delta":{"reasoning_content":"a"}}]}', True),
        (b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True),
        (b'{"choices":[{"delta":null,"text":null}],"usage":null}', False),
        (b'{"choices":[]}', False),
    ],
)
def test_which_events_carry_text(payload: bytes, has_text: bool) -> None:
    assert read_answer(payload).has_text is has_text


@given(st.binary())
def test_any_payload_is_read_or_an_error(payload: bytes) -> None:
    answer = read_answer(payload)
    assert answer.error is not None or isinstance(orjson.loads(payload), dict)


def test_a_finish_reason_ends_an_answer() -> None:
    assert read_answer(b'{"choices":[{"text":"","finish_reason":"length"}]}').finished
    assert not read_answer(b'{"choices":[{"text":"a","finish_reason":null}]}').finished


def test_failures_are_one_line() -> None:
    assert read_failure(429, b'{"error": {"message": "queue full"}}') == "HTTP 429: queue full"
    assert read_failure(502, b"<h1>Bad\nGateway</h1>") == "HTTP 502: <h1>Bad Gateway</h1>"


# results


@given(st.lists(times, min_size=1, max_size=60))
def test_percentiles_by_their_definition(values: list[float]) -> None:
    got = Distribution.of_seconds(values)
    assert got is not None
    ranked = sorted(v * 1000.0 for v in values)

    def interpolated(q: float) -> float:
        rank = q * (len(ranked) - 1)
        low, share = int(rank), rank % 1
        return ranked[low] + share * (ranked[min(low + 1, len(ranked) - 1)] - ranked[low])

    assert got.max == ranked[-1]
    for value, q in ((got.p50, 0.5), (got.p90, 0.9), (got.p99, 0.99)):
        assert value == pytest.approx(interpolated(q), rel=1e-9, abs=1e-9)


def sample(start: float, gaps: list[float], *, tokens: int | None = None, error: str | None = None) -> Sample:
    times = list(itertools.accumulate([start, *gaps]))
    made = Sample(start=start, sent=start, end=times[-1], text_times=times[1:], chunks=len(gaps), error=error)
    if tokens is not None:
        made.prompt_tokens, made.completion_tokens = 5, tokens
    return made


@given(st.lists(st.tuples(times, st.lists(st.floats(1e-6, 10), min_size=1, max_size=8)), min_size=1, max_size=12))
def test_summary_of_answered_requests(shapes: list[tuple[float, list[float]]]) -> None:
    samples = [sample(start, gaps, tokens=2 * len(gaps)) for start, gaps in shapes]
    got = summarize("closed", 3, samples, cpu_s=0.25)
    events = sum(len(gaps) for _, gaps in shapes)
    assert (got.completed, got.errors, got.token_source) == (len(shapes), {}, "usage")
    assert got.output_tokens == 2 * events
    assert got.output_tokens_per_s * got.duration_s == pytest.approx(2 * events)
    assert got.requests_per_s * got.duration_s == pytest.approx(len(shapes))
    assert got.input_tokens == 5 * len(shapes)
    assert got.ttft_ms is not None
    assert got.ttft_ms.max == pytest.approx(1000 * max(gaps[0] for _, gaps in shapes), rel=1e-6, abs=1e-5)
    gap_count = events - len(shapes)
    assert (got.itl_ms is None) == (gap_count == 0)
    assert got.client_us_per_event == pytest.approx(0.25e6 / events)


def test_summary_leaves_failures_out_of_the_times() -> None:
    good, bad = sample(0.0, [1.0, 1.0, 1.0]), sample(0.0, [9.0, 9.0], error="HTTP 500: no")
    got = summarize("open", 2.0, [good, bad, bad], cpu_s=0.0)
    assert (got.requests, got.completed, got.errors) == (3, 1, {"HTTP 500: no": 2})
    assert (got.output_tokens, got.token_source, got.input_tokens) == (3, "events", None)
    assert got.e2e_ms == Distribution(3000.0, 3000.0, 3000.0, 3000.0, 3000.0)
    assert got.tpot_ms == Distribution(1000.0, 1000.0, 1000.0, 1000.0, 1000.0)
    assert got.duration_s == 18.0


def test_summary_without_an_answer() -> None:
    got = summarize("closed", 1, [sample(0.0, [1.0], error="x")], cpu_s=0.0)
    assert (got.completed, got.output_tokens_per_s, got.ttft_ms, got.token_source) == (0, 0.0, None, "none")


# when requests go out


@settings(max_examples=25, deadline=None)
@given(requests=st.integers(1, 30), concurrency=st.integers(1, 12))
def test_closed_loop_keeps_so_many_in_flight(requests: int, concurrency: int) -> None:
    in_flight, most, sent = 0, 0, []

    async def send(request: bytes, start: float) -> Sample:
        nonlocal in_flight, most
        in_flight, most = in_flight + 1, max(most, in_flight + 1)
        sent.append(request)
        await asyncio.sleep(0)
        in_flight -= 1
        return Sample(start)

    asked = [str(i).encode() for i in range(requests)]
    samples = asyncio.run(closed_loop(send, asked, concurrency))
    assert sent == asked
    assert len(samples) == requests
    assert most == min(requests, concurrency)


def test_open_loop_waits_for_nobody() -> None:
    release = asyncio.Event()
    asked: list[float] = []

    async def send(request: bytes, start: float) -> Sample:
        asked.append(start)
        if len(asked) == 4:
            release.set()
        await release.wait()  # the first is answered only after the last has been sent
        return Sample(start)

    samples = asyncio.run(open_loop(send, [b""] * 4, [0.0, 0.001, 0.002, 0.004]))
    due = [s.start - min(asked) for s in sorted(samples, key=lambda s: s.start)]
    assert due == pytest.approx([0.0, 0.001, 0.002, 0.004])


# settings


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--url", "localhost:8000"], "--url (HEADRACE_BENCH_URL)"),
        (["--concurrency", "4,0"], "--concurrency (HEADRACE_BENCH_CONCURRENCY)"),
        (["--concurrency", "many"], "--concurrency (HEADRACE_BENCH_CONCURRENCY)"),
        (["--rate", "inf"], "--rate (HEADRACE_BENCH_RATE)"),
        (["--concurrency", "1,2", "--rate", "3", "--num-requests", "5,6"], "one for each of the 3 levels"),
        (["--num-requests", "0"], "one number above 0"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--extra-body", "{"], "must be JSON"),
        (["--shared-prefix", "98", "--input-len", "100"], "97 at most"),
    ],
)
def test_wrong_settings_are_named(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        bench_settings(*argv)
    assert complaint in str(error.value)


def test_levels_and_their_requests() -> None:
    assert bench_settings().levels == [("closed", 1, 64), ("closed", 8, 64), ("closed", 32, 64)]
    mixed = bench_settings("--concurrency", "4", "--rate", "0.5,2", "--num-requests", "7,8,9")
    assert mixed.levels == [("closed", 4, 7), ("open", 0.5, 8), ("open", 2, 9)]
    assert bench_settings("--rate", "2").levels == [("open", 2, 64)]


def test_url_with_or_without_version() -> None:
    assert {bench_settings("--url", f"http://h:1{tail}").url for tail in ("", "/", "/v1", "/v1/")} == {"http://h:1"}


# the whole, against a server


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeOpenAI]:
    with fake_openai() as server:
        yield server


def run_bench(fake: FakeOpenAI, folder: Path, *argv: str) -> tuple[int, dict[str, Any]]:
    fake.bodies.clear()
    fake.headers.clear()
    fake.most_in_flight = 0
    file = folder / "deep" / "report.json"
    status = main(["--url", fake.url, "--output", str(file), *argv])
    report: dict[str, Any] = orjson.loads(file.read_bytes())
    return status, report


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_closed_loop_over_http(
    fake: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    argv = ["--endpoint", endpoint, "--concurrency", "1,6", "--num-requests", "12", "--output-len", "8"]
    status, report = run_bench(fake, tmp_path, *argv, "--input-len", "20", "--api-key", "hush", "--label", "the fake")
    assert status == 0
    assert [(r["loop"], r["level"], r["completed"], r["errors"]) for r in report["results"]] == [
        ("closed", 1, 12, {}),
        ("closed", 6, 12, {}),
    ]
    for result in report["results"]:
        assert (result["output_tokens"], result["input_tokens"], result["token_source"]) == (96, 240, "usage")
        assert 0 < result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["max"]
        assert result["client_us_per_event"] > 0
    assert 1 < fake.most_in_flight <= 6
    prompts = [b.get("prompt") or b["messages"][0]["content"] for b in fake.bodies]
    assert len(set(prompts)) == len(prompts) == 4 + 24  # warm-up included
    assert {h["authorization"] for h in fake.headers} == {"Bearer hush"}
    assert b"hush" not in (tmp_path / "deep" / "report.json").read_bytes()
    shown = capsys.readouterr().out
    assert "the fake" in shown
    assert "12/12" in shown


def test_open_loop_over_http(fake: FakeOpenAI, tmp_path: Path) -> None:
    argv = ["--rate", "200", "--num-requests", "20", "--output-len", "4", "--seed", "3", "--warmup", "0"]
    status, report = run_bench(fake, tmp_path, *argv)
    assert status == 0
    (result,) = report["results"]
    assert (result["loop"], result["level"], result["completed"]) == ("open", 200.0, 20)
    assert result["duration_s"] >= poisson_arrivals(200.0, 20, 3)[-1] - poisson_arrivals(200.0, 20, 3)[0]
    assert report["settings"]["seed"] == 3
    assert result["lag_ms"] is not None


def test_answers_without_a_stream(fake: FakeOpenAI, tmp_path: Path) -> None:
    argv = ["--no-stream", "--concurrency", "2", "--num-requests", "4", "--output-len", "5", "--endpoint", "chat"]
    status, report = run_bench(fake, tmp_path, *argv)
    assert status == 0
    (result,) = report["results"]
    assert (result["output_tokens"], result["ttft_ms"], result["itl_ms"]) == (20, None, None)
    assert result["e2e_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("model", "tokens", "source"), [("no-usage", 8, "events"), ("pairs", 8, "usage"), ("undone", 8, "usage")]
)
def test_who_counts_the_tokens(fake: FakeOpenAI, tmp_path: Path, model: str, tokens: int, source: str) -> None:
    argv = ["--model", model, "--concurrency", "1", "--num-requests", "1", "--output-len", "8"]
    status, report = run_bench(fake, tmp_path, *argv)
    assert status == 0
    assert (report["results"][0]["output_tokens"], report["results"][0]["token_source"]) == (tokens, source)


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("broken", "HTTP 500: out of order"),
        ("html", "HTTP 502: <h1>Bad Gateway</h1>"),
        ("cut", "stream ended without a finish_reason or [DONE]"),
        ("dropped", "connection closed within the answer"),
        ("fails", "worker lost"),
        ("silent", "no answer within 0.3 s"),
    ],
)
def test_failures_are_counted_by_name(
    fake: FakeOpenAI, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, error: str
) -> None:
    argv = ["--model", model, "--concurrency", "2", "--num-requests", "3", "--warmup", "0"]
    status, report = run_bench(fake, tmp_path, *argv, "--timeout-s", "0.3" if model == "silent" else "60")
    assert status == 1
    (result,) = report["results"]
    assert (result["completed"], result["errors"]) == (0, {error: 3})
    assert result["output_tokens"] == 0
    assert error.split(":")[0] in capsys.readouterr().out


def test_a_server_that_fails_the_warm_up_is_not_measured(fake: FakeOpenAI, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out of order"):
        run_bench(fake, tmp_path, "--model", "broken")
    assert not list(tmp_path.rglob("*.json"))


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match=r"cannot connect.*start the server first"):
        main(["--url", f"http://127.0.0.1:{port}"])


def test_report_that_cannot_be_written(fake: FakeOpenAI, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--output .*name a file that can be written"):
        main(["--url", fake.url, "--output", str(tmp_path / "file" / "report.json")])


def test_connections_are_kept_and_not_shared(fake: FakeOpenAI) -> None:
    async def talk() -> tuple[int, int]:
        client = Client(fake.url)
        body = request_body(bench_settings("--output-len", "3"), "good", "one two three")
        request = client.post("/v1/completions", body)
        one_by_one = await closed_loop(client.send, [request] * 5, 1)
        after_one = len(client._idle)
        together = await closed_loop(client.send, [request] * 10, 5)
        after_five = len(client._idle)
        await client.close()
        assert all(s.error is None and s.output_tokens == 3 for s in one_by_one + together)
        return after_one, after_five

    after_one, after_five = asyncio.run(talk())
    assert after_one == 1
    assert 1 < after_five <= 5


@pytest.mark.parametrize(("answers", "errors"), [(1, []), (0, ["connection closed within the answer"] * 3)])
def test_a_kept_connection_may_be_closed_by_the_server(answers: int, errors: list[str]) -> None:
    """A server that hangs up after `answers` answers, without a word: only one that never answers has failed."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(answers):
            await reader.readuntil(b"hello")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await reader.readuntil(b"hello")
        writer.close()
        await writer.wait_closed()

    async def talk() -> list[Sample]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        samples = await closed_loop(client.send, [client.post("/", b"hello")] * 3, 1)
        await client.close()
        server.close()
        return samples

    samples = asyncio.run(talk())
    assert [s.error for s in samples if s.error is not None] == errors
    assert connections == 3
