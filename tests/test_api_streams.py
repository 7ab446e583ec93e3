"""Streams that break: places, going on after any event, clients that leave, keep-alive comments."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
import pytest
from headrace.api.answers.events import Cursor, LastEvent, Place, StreamEvent, place_of
from headrace.api.errors import ClientGone
from headrace.api.inputs import Caller
from headrace.api.plan import Plan
from headrace.api.settings import ApiSettings
from headrace.api.sse import EventStream, event, unless_gone
from headrace.api.streams import encoded
from headrace.shared.chunks import Finish, TextChunk, Usage
from headrace.shared.errors import EngineError, InvalidRequest, StoreUnavailable, StreamGone, Unavailable
from headrace.shared.messages import GenerateJob
from hypothesis import given
from hypothesis import strategies as st
from kit.fake_backend import FakeBackend, Step, app, say, services
from kit.loopback import serve

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def blocks(text: str) -> list[str]:
    """The events of a stream, without its comments and its end."""
    found = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert found[-1] == "data: [DONE]"
    return found[:-1]


def id_of(block: str) -> str:
    return block.split("\n")[0].removeprefix("id: ")


def uneven(job: GenerateJob, choice: int) -> list[Step]:
    return [say("He", "l", "lo"), say("世", "", "界", finish=Finish("length")), say("x")][choice]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"n": 3, "stream_options": {"include_usage": True}},
    "/v1/completions": {"model": "m", "prompt": "The ", "echo": True, "n": 3, "stream": True},
    "/generate": {"text": "a", "sampling_params": {"n": 3}, "stream": True},
}


SHARED = FakeBackend(script=uneven)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve(app(SHARED)) as url, httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
        yield client


@pytest.mark.parametrize("path", BODIES)
def test_a_client_goes_on_after_any_event(http: httpx.Client, path: str) -> None:
    whole = blocks(http.post(path, json=BODIES[path]).text)
    assert len({id_of(block) for block in whole}) == len(whole)
    request = id_of(whole[0]).partition(":")[0]
    for at, block in enumerate(whole):
        headers = {"Last-Event-ID": id_of(block)}
        assert blocks_or_none(http.post(path, json=BODIES[path], headers=headers)) == whole[at + 1 :]
        assert blocks_or_none(http.get(f"/v1/streams/{request}", headers=headers)) == whole[at + 1 :]
    assert blocks(http.get(f"/v1/streams/{request}").text) == whole


def blocks_or_none(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return blocks(answer.text)


def test_a_repeated_post_never_begins_another_stream(http: httpx.Client) -> None:
    whole = blocks(http.post("/v1/chat/completions", json=CHAT).text)
    jobs = len(SHARED.jobs)
    for last, status in (
        (id_of(whole[0]), 200),
        ("0192f3a4b5c67d8e9f0a1b2c3d4e5f60-0:0.0", 410),
        ("someone-else:0.0", 404),
        ("garbage", 400),
        (id_of(whole[0]) + ",0.0", 400),
    ):
        assert http.post("/v1/chat/completions", json=CHAT, headers={"Last-Event-ID": last}).status_code == status
    answer = http.post("/v1/completions", json=BODIES["/v1/completions"], headers={"Last-Event-ID": id_of(whole[0])})
    assert answer.status_code == 400
    assert len(SHARED.jobs) == jobs


def test_a_stream_is_found_by_the_answers_id_too(http: httpx.Client) -> None:
    whole = blocks(http.post("/v1/chat/completions", json=CHAT).text)
    name = orjson.loads(whole[0].split("data: ")[1])["id"]
    assert blocks(http.get(f"/v1/streams/{name}").text) == whole
    assert http.get("/v1/streams/nope").status_code == 404


def test_a_stream_goes_on_for_its_own_tenant_only() -> None:
    settings = ApiSettings(api_key=("a:ka", "b:kb"))
    with serve(app(FakeBackend(), settings)) as url, httpx.Client(base_url=url, trust_env=False) as http:
        mine, other = {"Authorization": "Bearer ka"}, {"Authorization": "Bearer kb"}
        request = id_of(blocks(http.post("/v1/chat/completions", json=CHAT, headers=mine).text)[0]).partition(":")[0]
        assert http.get(f"/v1/streams/{request}", headers=mine).status_code == 200
        assert http.get(f"/v1/streams/{request}", headers=other).status_code == 404


PLACES = st.none() | st.builds(Place, st.integers(0, 10**12), st.integers(0, 10**6), st.booleans())


@given(places=st.lists(PLACES, min_size=1, max_size=5).map(tuple), ended=st.booleans())
def test_an_events_id_is_read_as_it_was_written(places: tuple[Place | None, ...], ended: bool) -> None:
    seen = LastEvent("0192-5", places, ended)
    text = Cursor("0192-5", len(places), seen)._id() + (":end" if ended else "")
    assert LastEvent.parse(text) == seen


@given(st.text(max_size=20))
def test_an_id_that_is_none_of_ours_is_refused_and_never_worse(text: str) -> None:
    try:
        LastEvent.parse(text)
    except InvalidRequest:
        return
    assert ":" in text


def test_places_are_in_the_order_of_a_stream() -> None:
    order = [Place(0, 0), Place(0, 1), Place(3, 1, False), Place(3, 1), Place(3, 2, False), Place(3, 2), Place(9, 1)]
    assert sorted(order) == order


def test_a_plan_is_read_as_it_was_written() -> None:
    plan = Plan("/v1/completions", ("a-0", "b-1"), 2, "m", "t", 5, "fp", echo=("x", "y"), logprobs=True)
    assert Plan.decode(plan.encode()) == plan


# --- clients that leave --------------------------------------------------------------------------------------------


async def reading(backend: FakeBackend, grace_s: float, act: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
    """Read a stream that does not end in a task, do `act` to it, and wait until all is said to the queue."""
    served = services(backend)
    prepared = await served.inference.prepare("/v1/chat/completions", CHAT, Caller())
    begun = asyncio.Event()

    async def read() -> None:
        async with encoded(prepared.plan, served.inference.run(prepared, grace_s=grace_s)) as events:
            async for _ in events:
                begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    await act(task)
    await asyncio.gather(task, return_exceptions=True)
    await served.readers.settle()
    assert len(served.readers) == 0


async def cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def never_ends(job: GenerateJob, choice: int) -> list[Step]:
    return [Step("a")]


def test_a_stream_outlives_its_client_by_the_grace() -> None:
    backend = FakeBackend(script=never_ends)
    asyncio.run(reading(backend, 2.0, cancel))
    assert [grace for _, grace in backend.left] == [2.0]
    assert backend.cancelled == []


def test_without_a_grace_it_is_cancelled_at_once() -> None:
    backend = FakeBackend(script=never_ends)
    asyncio.run(reading(backend, 0, cancel))
    assert len(backend.cancelled) == 1
    assert backend.left == []


def test_a_finished_stream_is_left_in_peace() -> None:
    async def nothing(task: asyncio.Task[None]) -> None:
        await task

    backend = FakeBackend()
    asyncio.run(reading(backend, 2.0, nothing))
    assert (backend.left, backend.cancelled) == ([], [])


def test_a_choice_that_fails_ends_the_others_at_once() -> None:
    def one_fails(job: GenerateJob, choice: int) -> list[Step]:
        return [Step("a")] if choice else [Step("a"), Step("", finish=Finish("error", message="bad"))]

    async def go() -> None:
        served = services(backend)
        prepared = await served.inference.prepare("/v1/chat/completions", CHAT | {"n": 3}, Caller())
        with pytest.raises(Exception, match="bad"):
            await served.inference.complete(prepared)
        await served.readers.settle()
        assert sorted(backend.cancelled) == sorted(prepared.plan.rids[1:])

    backend = FakeBackend(script=one_fails)
    asyncio.run(go())


def test_a_refused_submit_takes_back_what_was_accepted() -> None:
    async def go() -> None:
        served = services(backend)
        prepared = await served.inference.prepare("/v1/completions", {"model": "m", "prompt": ["a", "b"]}, Caller())
        backend.error = Unavailable("down")
        with pytest.raises(Unavailable):
            await served.inference.complete(prepared)
        await served.readers.settle()
        assert sorted(backend.cancelled) == sorted(prepared.plan.rids)

    backend = FakeBackend()
    asyncio.run(go())


class FirstRefused(FakeBackend):
    """Refuses the first prompt at once, and accepts the others a little later."""

    async def submit(self, job: GenerateJob, **options: Any) -> tuple[str, ...]:
        if job.input_ids == (0,):
            raise Unavailable("down")
        await asyncio.sleep(0.05)
        assert not self.cancelled, "taken back before it was accepted, it would run for nobody"
        return await super().submit(job, **options)


def test_what_is_still_being_accepted_is_taken_back_too() -> None:
    async def go() -> None:
        served = services(backend)
        prepared = await served.inference.prepare("/v1/completions", {"model": "m", "prompt": [[0], [1]]}, Caller())
        with pytest.raises(Unavailable):
            await served.inference.complete(prepared)
        await served.readers.settle()
        assert len(backend.jobs) == 1
        assert sorted(backend.cancelled) == sorted(prepared.plan.rids)

    backend = FirstRefused()
    asyncio.run(go())


def test_a_client_that_comes_back_ends_its_older_connection() -> None:
    async def go() -> None:
        served = services(backend)
        prepared = await served.inference.prepare("/v1/chat/completions", CHAT, Caller())
        plan, begun = prepared.plan, asyncio.Event()

        async def read(run: Any) -> None:
            async with encoded(plan, run) as events:
                async for _ in events:
                    begun.set()

        first = asyncio.create_task(read(served.inference.run(prepared, grace_s=1.0)))
        await begun.wait()
        again = asyncio.create_task(read(served.inference.resume(plan, grace_s=1.0)))
        await asyncio.wait({first})
        assert first.cancelled()
        await served.readers.settle()
        assert (backend.left, backend.cancelled) == ([], [])
        assert len(served.readers) == 1
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await served.readers.settle()
        assert backend.touched == list(plan.rids)
        assert [rid for rid, _ in backend.left] == list(plan.rids)

    backend = FakeBackend(script=never_ends)
    asyncio.run(go())


def test_a_client_that_drops_its_connection_is_noticed() -> None:
    """Over real sockets: a stream and a whole answer, left before their end."""
    backend = FakeBackend(script=never_ends)
    with serve(app(backend)) as url, httpx.Client(base_url=url, trust_env=False) as http:
        with http.stream("POST", "/v1/chat/completions", json=CHAT, headers={"X-Resume-Grace": "7"}) as answer:
            next(answer.iter_bytes())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/chat/completions", json=CHAT | {"stream": False}, timeout=0.3)
        # The server has read both ends once it can answer on a new connection and its tasks have run.
        for _ in range(200):
            if backend.left and backend.cancelled:
                break
            http.get("/health")
    assert [grace for _, grace in backend.left] == [7.0]
    assert len(backend.cancelled) == 1


@pytest.mark.parametrize("grace", ["nan", "inf", "-1", "soon"])
def test_a_grace_is_a_number_of_seconds(http: httpx.Client, grace: str) -> None:
    answer = http.post("/v1/chat/completions", json=CHAT, headers={"X-Resume-Grace": grace})
    assert answer.status_code == 400
    assert "X-Resume-Grace" in answer.json()["error"]["message"]


# --- the wire ------------------------------------------------------------------------------------------------------


class Wire:
    """An ASGI connection that records what is sent, and whose client leaves when told."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self._moved = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._moved.set()

    async def until(self, data: bytes) -> None:
        """Wait until `data` was sent."""
        while data not in self.body:
            self._moved.clear()
            await self._moved.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


async def send_events(wire: Wire, events: Any, first_wait_s: float = 60.0, keep_alive_s: float = 60.0) -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[AsyncGenerator[bytes, None]]:
        yield events()

    stream = EventStream(opened, first_wait_s=first_wait_s, keep_alive_s=keep_alive_s)
    await stream({"type": "http"}, wire.receive, wire.send)


def test_headers_wait_for_the_first_event_but_not_for_ever() -> None:
    async def go() -> None:
        async def slow() -> AsyncGenerator[bytes, None]:
            await wait.wait()
            yield event({"a": 1}, "x")

        wire, wait = Wire(), asyncio.Event()
        sending = asyncio.create_task(send_events(wire, slow, first_wait_s=0.02, keep_alive_s=0.02))
        await wire.until(b": keep-alive\n: keep-alive\n")
        wait.set()
        await sending
        assert wire.body.replace(b": keep-alive\n", b"") == b'id: x\ndata: {"a":1}\n\ndata: [DONE]\n\n'
        assert [message["type"] for message in wire.sent].count("http.response.start") == 1
        assert wire.sent[-1]["more_body"] is False

    asyncio.run(go())


def test_an_error_is_raised_before_the_headers_and_an_event_after_them() -> None:
    async def fails(*first: bytes) -> AsyncGenerator[bytes, None]:
        for data in first:
            yield data
        raise EngineError("secret")

    async def go() -> None:
        wire = Wire()
        with pytest.raises(EngineError):
            await send_events(wire, fails)
        assert wire.sent == []
        await send_events(wire, lambda: fails(b"data: 1\n\n"))
        assert b"secret" not in wire.body
        first, error, done = wire.body.split(b"\n\n")[:-1]
        assert (first, done) == (b"data: 1", b"data: [DONE]")
        assert orjson.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"

    asyncio.run(go())


def test_a_stream_stops_when_its_client_goes() -> None:
    async def go() -> None:
        closed = asyncio.Event()

        async def endless() -> AsyncGenerator[bytes, None]:
            try:
                yield b"data: 1\n\n"
                await asyncio.Event().wait()
            finally:
                closed.set()

        wire = Wire()
        sending = asyncio.create_task(send_events(wire, endless))
        await wire.until(b"data: 1")
        wire.gone.set()
        await sending
        assert closed.is_set()
        assert b"[DONE]" not in wire.body

    asyncio.run(go())


def test_work_stops_when_its_client_goes() -> None:
    async def go() -> None:
        async def value() -> int:
            return 7

        async def forever() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                stopped.set()

        wire, stopped = Wire(), asyncio.Event()
        assert await unless_gone(wire.receive, value()) == 7
        wire.gone.set()
        with pytest.raises(ClientGone):
            await unless_gone(wire.receive, forever())
        assert stopped.is_set()

    asyncio.run(go())


def test_the_cursor_counts_what_it_lets_pass() -> None:
    cursor = Cursor("r", 2)
    cursor.follow(1, text_chunk(0, "abc"))
    assert cursor.advance(StreamEvent({}, 1, Place(3, 1))) == f"r:,3.1.{ABC}"
    assert cursor.advance(StreamEvent({}, 0, Place(2, 1, False))) == f"r:2.1.0-,3.1.{ABC}"
    assert cursor.advance(StreamEvent({})) == f"r:2.1.0-,3.1.{ABC}:end"


ABC = f"{zlib.crc32(b'abc'):x}"


def text_chunk(offset: int, text: str, seq: int = 1, **more: Any) -> TextChunk:
    return TextChunk("r-0.0", offset, text, Usage(1, 1), seq=seq, **more)


def rest_after(place: str, texts: list[str], last: dict[str, Any]) -> str:
    """What a client that has everything up to `place` is sent of these chunks: text, and `.` for the end.

    Raises:
        StreamGone.
    """
    cursor, offset, rest = Cursor("r", 1, LastEvent.parse(f"r:{place}")), 0, ""
    for n, text in enumerate(texts, 1):
        chunk = text_chunk(offset, text, **{"seq": 1 if text else 2} | (last if n == len(texts) else {}))
        for piece in cursor.follow(0, chunk):
            if cursor.advance(StreamEvent({}, 0, place_of(piece))) is not None:
                rest += piece.text + ("." if piece.finish else "")
        offset += len(text)
    return rest


END: dict[str, Any] = {"finish": Finish("stop")}
TOKENS: dict[str, Any] = {"token_ids": (1, 2)}


@pytest.mark.parametrize(
    ("place", "texts", "last", "rest"),
    [
        (f"3.1.{ABC}-", ["ab", "c", "d"], {}, "d"),
        (f"3.1.{ABC}-", ["abc", "d"], {}, "d"),
        ("3.1", ["xyz", "d"], {}, "d"),  # an event of an earlier release says less
        (f"3.1.{ABC}-", ["abx", "d"], {}, None),
        ("0.0", ["xyz"], {}, "xyz"),  # the role alone
        # A store that had lost its tail may have got it in other chunks.
        (f"3.1.{ABC}-", ["ab", "cd"], {}, "d"),
        (f"3.1.{ABC}-", ["ab", "xd"], {}, None),
        (f"3.1.{ABC}-", ["abcde"], END, "de."),
        (f"3.1.{ABC}-", ["abc"], END, "."),
        (f"3.1.{ABC}-", ["abc", ""], END, "."),
        (f"3.2.{ABC}-", ["abc"], END, "."),
        (f"3.2.{ABC}-", ["abc", "de"], END, "de."),
        (f"3.1.{ABC}-", ["ab"], END, None),
        ("3.1", ["ab", "cd"], {}, None),
        ("3.1", ["ab"], END, None),
        # Of tokens the client has all or none.
        (f"3.1.{ABC}-", ["ab", "cd"], TOKENS, None),
        (f"3.1.{ABC}-", ["ab", "c"], TOKENS | END, "."),
        # A choice that had ended for the client says no more.
        (f"3.1.{ABC}", ["abc"], END, ""),
        (f"3.1.{ABC}", ["ab", "c", ""], END, ""),
        (f"3.1.{ABC}", ["abc", "d"], END, None),
    ],
)
def test_a_stream_goes_on_behind_what_the_client_has_where_it_says_that_again(
    place: str, texts: list[str], last: dict[str, Any], rest: str | None
) -> None:
    with contextlib.nullcontext() if rest is not None else pytest.raises(StreamGone, match="has lost"):
        assert rest_after(place, texts, last) == rest


class Unreachable(FakeBackend):
    """Whose store is away when a lease is to be taken."""

    async def touch(self, rids: Any, *, reader_lease_s: float | None, reader: str) -> dict[str, bool]:
        raise StoreUnavailable("away")


def test_a_stream_that_cannot_be_gone_on_with_is_not_cancelled() -> None:
    async def go() -> None:
        served = services(backend)
        prepared = await served.inference.prepare("/v1/chat/completions", CHAT, Caller())
        with pytest.raises(StoreUnavailable):
            async with served.inference.resume(prepared.plan, grace_s=1.0):
                pass
        await served.readers.settle()
        assert (backend.left, backend.cancelled, len(served.readers)) == ([], [], 0)

    backend = Unreachable()
    asyncio.run(go())


@pytest.mark.parametrize("error", [StreamGone("lost"), Unavailable("away"), StoreUnavailable("away"), OSError("cut")])
@pytest.mark.parametrize(("grace_s", "left", "cancelled"), [(2.0, [20.0], 0), (60.0, [60.0], 0), (0.0, [], 1)])
def test_a_stream_that_we_cannot_go_on_with_waits_for_its_client(
    error: Exception, grace_s: float, left: list[float], cancelled: int
) -> None:
    async def go() -> None:
        served = services(backend)
        with pytest.raises(type(error)):
            async with served.readers.attach(["r-0.0"], grace_s=grace_s):
                raise error
        await served.readers.settle()

    backend = FakeBackend()
    asyncio.run(go())
    assert ([grace for _, grace in backend.left], len(backend.cancelled)) == (left, cancelled)
