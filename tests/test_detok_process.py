"""The detokenizer as a process, over a real server: takeover, sharing of shards, outages, poison."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from headrace.detok import loop, streams
from headrace.detok.loop import Detokenizer
from headrace.detok.shards import Shards
from headrace.detok.streams import Streams, merge
from headrace.detok.vocabularies import Vocabularies
from headrace.shared import keys
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import Finish, TextChunk, TokenChunk, TokenLogprob
from headrace.shared.clients import Client, connect, connect_async
from headrace.shared.ids import new_family, shard_in
from headrace.shared.job_queue import JobQueue
from headrace.shared.messages import GenerateJob, SamplingParams
from headrace.shared.model_card import ModelCard
from headrace.shared.registry import Membership, ProcessInfo, processes, register_model
from headrace.shared.scripts import Scripts
from headrace.shared.signals import StopSignal
from headrace.shared.text_stream import TextStream, decode_entry
from headrace.shared.token_stream import Append, TokenStream, Written
from kit.tokenizers import byte_level

if TYPE_CHECKING:
    from conftest import Server

SHARDS = keys.DEFAULT_SHARDS
SHARD_LEASE_S = 3.0
KIT = byte_level()
SHA = hashlib.sha256(KIT.blob).hexdigest()
LENGTH = Finish("length")


def until(what: Callable[[], Any], limit_s: float = 40.0) -> Any:
    """Wait for something to become true; the limit only ends a test that hangs."""
    end = time.monotonic() + limit_s
    while not (value := what()):
        assert time.monotonic() < end, f"still not true after {limit_s} s"
        time.sleep(0.02)
    return value


class Rig:
    """The api's and a worker's ends of one Redis."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client: Client = connect(url)
        self.client.set(keys.blob(SHA), KIT.blob)
        scripts = Scripts(self.client, limit_s=20.0)
        self._queue = JobQueue(self.client, scripts, SHARDS)
        self._tokens = TokenStream(self.client, scripts, "w", lease_s=60.0)
        self._epochs: dict[str, int] = {}

    def submit(self, count: int = 1, tokenizer: str = SHA, **sampling: Any) -> list[str]:
        """Accept requests, and claim them as their worker."""

        async def go() -> list[str]:
            client = connect_async(self.url)
            queue = AsyncJobQueue(client, SHARDS)
            params = SamplingParams(sampling_seed=1, **sampling)
            rids: list[str] = []
            for _ in range(count):
                job = GenerateJob(new_family(SHARDS), "m", "m", tokenizer, (1, 2), params, return_logprob=True)
                rids += await queue.submit(job, deadline_s=600, reader_lease_s=None, keep_s=600)
            await client.aclose()
            return rids

        rids = asyncio.run(go())
        while claims := self._queue.pull("m", owner="w", consumer="h:0", slots=100, lease_s=60.0):
            self._epochs |= {claim.job.rid: claim.epoch for claim in claims}
        return rids

    def append(self, rid: str, start: int, ids: Sequence[int], finish: Finish | None = None) -> Written:
        values = tuple(TokenLogprob(-float(start + i)) for i in range(len(ids)))
        chunk = TokenChunk(rid, start, tuple(ids), values, finish)
        return self._tokens.append([Append(self._epochs[rid], chunk)])[rid]

    def chunks(self, rid: str) -> list[TextChunk]:
        entries = self.client.xrange(keys.text(shard_in(rid), rid))
        return [decode_entry(rid, entry, fields)[0] for entry, fields in entries]

    def finished(self, rid: str) -> list[TextChunk]:
        """The chunks of a request, once it has ended; its tokens are gone by then."""
        key = keys.request(shard_in(rid), rid)
        until(lambda: self.client.hget(key, "st") == b"done")
        assert not self.client.exists(keys.tokens(shard_in(rid), rid))
        chunks = self.chunks(rid)
        assert [c.offset for c in chunks] == [0, *(c.end for c in chunks[:-1])]
        logprobs = [p.logprob for c in chunks for p in c.logprobs or ()]
        assert logprobs == [-float(i) for i in range(chunks[-1].usage.completion_tokens)]
        return chunks

    def text(self, rid: str) -> str:
        return "".join(chunk.text for chunk in self.finished(rid))

    def owners(self) -> list[bytes]:
        """The owner of each shard that has one."""
        owners = [self.client.hget(keys.lease(shard), "owner") for shard in range(SHARDS)]
        return [owner for owner in owners if owner]


class Stop(StopSignal):
    """Stops a detokenizer that runs in a thread, where no signal is heard."""

    def __init__(self) -> None:
        self.count = 0


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.client.close()


@contextmanager
def detokenizer(
    rig: Rig, name: str = "d", slice_requests: int = 256, tokens: TokenStream | None = None
) -> Iterator[Stop]:
    """A detokenizer in a thread, drained at the end."""
    client, stop, member = connect(rig.url), Stop(), Membership(ProcessInfo("detok", id=name))
    scripts, flushes = (Scripts(client, on_outage=lambda error: detok.note_outage(error)) for _ in range(2))
    shards = Shards(client, scripts, name, name, SHARDS, SHARD_LEASE_S)
    vocabularies = Vocabularies(client, shards.held)
    detok = Detokenizer(
        shards,
        Streams(tokens or TokenStream(client, scripts), TextStream(client, flushes, name), vocabularies.get),
        vocabularies,
        JobQueue(client, scripts, SHARDS),
        client,
        member,
        lease_s=6.0,
        text_budget=1 << 20,
        slice_requests=slice_requests,
        stop=stop,
    )
    thread = threading.Thread(target=detok.run)
    thread.start()
    try:
        yield stop
    finally:
        stop.count = 1
        thread.join(30)
        assert not thread.is_alive()
        client.close()


@contextmanager
def process(rig: Rig) -> Iterator[subprocess.Popen[bytes]]:
    """`headrace detok` as its own process."""
    code = "import sys; from headrace.deploy.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "detok", "--redis-url", rig.url, "--shard-lease-s", str(SHARD_LEASE_S)]
    child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until(lambda: [p for p in processes(rig.client) if p.pid == child.pid and p.state == "ready"])
        yield child
    finally:
        child.kill()
        child.wait()


def test_tokens_become_text_for_many_requests_at_once(rig: Rig) -> None:
    texts = {rid: f"request {n}: naïve 世界 😊 {n * n}" for n, rid in enumerate(rig.submit(40))}
    spelled = {rid: KIT.spelled(text) for rid, text in texts.items()}
    with detokenizer(rig, slice_requests=16):
        for start in range(0, max(map(len, spelled.values())), 3):
            for rid, ids in spelled.items():
                if start < len(ids):
                    end = LENGTH if start + 3 >= len(ids) else None
                    assert rig.append(rid, start, ids[start : start + 3], end) is Written.OK
        for rid, text in texts.items():
            assert rig.text(rid) == text
            assert rig.chunks(rid)[-1].finish == LENGTH


def test_a_stop_string_ends_the_request_for_its_worker(rig: Rig) -> None:
    (rid,) = rig.submit(stop=("STOP",))
    with detokenizer(rig):
        rig.append(rid, 0, KIT.spelled("so far. STO"))
        rig.append(rid, 11, KIT.spelled("P and more"))
        chunks = rig.finished(rid)
        assert chunks[-1].finish == Finish("stop", "STOP")
        assert chunks[-1].usage.completion_tokens == 12
        assert "".join(c.text for c in chunks) == "so far. "
        assert rig.append(rid, 21, KIT.spelled("never read")) is Written.ENDED


def test_what_waits_at_the_start_is_found_without_hints(rig: Rig) -> None:
    rids = rig.submit(20)
    for rid in rids:
        rig.append(rid, 0, KIT.spelled("before any detokenizer"), LENGTH)
    with detokenizer(rig, slice_requests=3):
        assert {rig.text(rid) for rid in rids} == {"before any detokenizer"}


def test_a_long_backlog_is_read_in_parts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "READ_ENTRIES", 4)
    (rid,) = rig.submit()
    *ids, end = KIT.spelled("a backlog!")
    for at, token_id in enumerate(ids):
        rig.append(rid, at, [token_id])
    rig.append(rid, len(ids), [end], Finish("stop", end))
    with detokenizer(rig):
        assert rig.text(rid) == "a backlog"  # the stop token is no text, though its entry was the last of a part
    assert len(rig.chunks(rid)) > 2


def test_a_missed_hint_is_found_later(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_OVER_EVERY_S", 0.2)
    (rid,) = rig.submit()
    with detokenizer(rig):
        rig.append(rid, 0, KIT.spelled("heard "))
        until(lambda: rig.chunks(rid))
        tokens = keys.tokens(shard_in(rid), rid)
        pipe = rig.client.pipeline()  # as if the hint had been trimmed before it was read
        pipe.xadd(tokens, {"t": ",".join(map(str, KIT.spelled("missed")))}, id="12-0")
        pipe.hset(keys.request(shard_in(rid), rid), "n", 12)
        pipe.execute()
        until(lambda: "".join(c.text for c in rig.chunks(rid)) == "heard missed")


class Counted(TokenStream):
    """Counts what is read."""

    def __init__(self, client: Client, scripts: Scripts) -> None:
        super().__init__(client, scripts)
        self.asked: list[str] = []

    def read(self, after: Mapping[str, int], limit: int | None = None) -> dict[str, list[TokenChunk]]:
        self.asked += after
        return super().read(after, limit)


def test_tokens_that_are_pushed_are_not_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_OVER_EVERY_S", 3600.0)
    (rid,) = rig.submit()
    tokens = Counted(rig.client, Scripts(rig.client))
    with detokenizer(rig, tokens=tokens):
        rig.append(rid, 0, KIT.spelled("read "))  # its record was, too
        until(lambda: rig.chunks(rid))
        asked = len(tokens.asked)
        for at, token_id in enumerate(KIT.spelled("pushed "), 5):
            rig.append(rid, at, [token_id])
        until(lambda: "".join(c.text for c in rig.chunks(rid)) == "read pushed ")
        assert len(tokens.asked) == asked
        rig.append(rid, 12, KIT.spelled("read"), LENGTH)
        assert rig.text(rid) == "read pushed read"
        assert len(tokens.asked) == asked + 1


def test_a_push_that_was_missed_is_read_with_the_next(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "LOOK_OVER_EVERY_S", 3600.0)
    (rid,) = rig.submit()
    with detokenizer(rig):
        rig.append(rid, 0, KIT.spelled("heard "))
        until(lambda: rig.chunks(rid))
        one, values = KIT.spelled("!"), b"[[-6.0,[]]]"
        pipe = rig.client.pipeline()
        pipe.xadd(keys.tokens(shard_in(rid), rid), {"t": one[0], "lp": values}, id="7-0")
        pipe.hset(keys.request(shard_in(rid), rid), "n", 7)
        pipe.execute()
        rig.append(rid, 7, KIT.spelled(" heard"))
        until(lambda: "".join(c.text for c in rig.chunks(rid)) == "heard ! heard")
        rig.append(rid, 13, KIT.spelled("."), LENGTH)
        assert rig.text(rid) == "heard ! heard."


def test_a_killed_detokenizers_successor_goes_on_exactly(rig: Rig) -> None:
    """It dies while it holds back half a stop string, and half a character."""
    rids = rig.submit(12, stop=("</end>",))
    halves = [(KIT.spelled("tail </e"), KIT.spelled("nd> x")), (KIT.spelled("😊")[:2], KIT.spelled("😊")[2:])]
    with process(rig) as first:
        until(lambda: len(rig.owners()) == SHARDS)
        for n, rid in enumerate(rids):
            rig.append(rid, 0, [*KIT.spelled("head "), *halves[n % 2][0]])
        until(lambda: all(rig.chunks(rid) for rid in rids))
        first.kill()
        first.wait()
    for n, rid in enumerate(rids):
        start = 5 + len(halves[n % 2][0])
        rig.append(rid, start, halves[n % 2][1], LENGTH)
    with detokenizer(rig):
        assert [rig.text(rid) for rid in rids] == ["head tail ", "head 😊"] * 6
        assert {rig.chunks(rid)[-1].finish for rid in rids} == {Finish("stop", "</end>"), LENGTH}


def test_shards_are_shared_and_handed_over(rig: Rig) -> None:
    (rid,) = rig.submit()
    with detokenizer(rig, "a"):
        until(lambda: rig.owners() == [b"a"] * SHARDS)
        with detokenizer(rig, "b"):
            until(lambda: sorted(rig.owners()) == [b"a"] * (SHARDS // 2) + [b"b"] * (SHARDS // 2))
            rig.append(rid, 0, KIT.spelled("one "))
            until(lambda: rig.chunks(rid))
        until(lambda: rig.owners() == [b"a"] * SHARDS)
        rig.append(rid, 4, KIT.spelled("two"), LENGTH)
        assert rig.text(rid) == "one two"
    assert rig.owners() == []
    assert processes(rig.client) == []


def test_a_stolen_shard_is_let_go_at_once(rig: Rig) -> None:
    (rid,) = rig.submit()
    shard = shard_in(rid)
    with detokenizer(rig, "a"):
        until(lambda: rig.owners() == [b"a"] * SHARDS)
        rig.client.hset(
            keys.lease(shard), mapping={"owner": "thief", "epoch": 99, "until": int(time.time() + 60) * 1000}
        )
        rig.append(rid, 0, KIT.spelled("not ours"))
        until(lambda: shard not in processes(rig.client)[0].extra["shards"])
        assert rig.chunks(rid) == []
        rig.client.hset(keys.lease(shard), mapping={"owner": "", "until": 0})
        rig.append(rid, 8, KIT.spelled(", ours again"), LENGTH)
        assert rig.text(rid) == "not ours, ours again"


def test_a_shard_that_its_share_leaves_is_taken_after_all(rig: Rig) -> None:
    """A peer that lives but takes nothing: nobody's shards do not stand still."""
    ghost = Membership(ProcessInfo("detok", id="ghost", state="ready"))
    ghost.beat(rig.client)

    def all_taken() -> bool:
        ghost.beat(rig.client)
        return rig.owners() == [b"a"] * SHARDS

    with detokenizer(rig, "a"):
        until(lambda: not all_taken() and len(rig.owners()) == SHARDS // 2)
        until(all_taken)
        for _ in range(30):  # three looks at the peers
            time.sleep(0.1)
            assert all_taken()


def test_two_processes_and_one_drained(rig: Rig) -> None:
    texts = {rid: f"text of {rid}" for rid in rig.submit(16)}
    with process(rig) as first, process(rig) as second:
        until(lambda: len(set(rig.owners())) == 2 and len(rig.owners()) == SHARDS)
        for rid, text in texts.items():
            rig.append(rid, 0, KIT.spelled(text[:9]))
        first.terminate()
        assert first.wait(30) == 0
        for rid, text in texts.items():
            rig.append(rid, 9, KIT.spelled(text[9:]), LENGTH)
        assert [rig.text(rid) for rid in texts] == list(texts.values())
        assert [p.pid for p in processes(rig.client)] == [second.pid]


def test_a_redis_that_restarts_loses_nothing(rig: Rig, redis_server: Server) -> None:
    rids = rig.submit(8)
    with detokenizer(rig):
        for rid in rids:
            rig.append(rid, 0, KIT.spelled("before "))
        until(lambda: all(rig.chunks(rid) for rid in rids))
        redis_server.kill()
        redis_server.start()
        for rid in rids:
            rig.append(rid, 7, KIT.spelled("and after"), LENGTH)
        assert {rig.text(rid) for rid in rids} == {"before and after"}


def test_told_to_stop_while_redis_is_away(rig: Rig, redis_server: Server) -> None:
    with detokenizer(rig) as stop:
        until(lambda: len(rig.owners()) == SHARDS)
        redis_server.kill()
        try:
            stop.count = 1
        finally:
            time.sleep(0.5)  # it notices the outage, and then that it may go
            redis_server.start()


def test_poison_ends_its_request_and_no_other(rig: Rig) -> None:
    damaged, unknown, good = rig.submit()[0], rig.submit(tokenizer="0" * 64)[0], rig.submit()[0]
    rig.client.hset(keys.request(shard_in(damaged), damaged), "ds", b"{}")
    with detokenizer(rig):
        for rid in (damaged, unknown, good):
            rig.append(rid, 0, KIT.spelled("text"), LENGTH)
        assert rig.text(good) == "text"
        for rid in (damaged, unknown):
            rig.finished(rid)
            assert rig.chunks(rid)[-1].finish == Finish("error", message="The request's tokens cannot be decoded.")


def test_registered_tokenizers_are_loaded_before_they_are_needed(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def card(name: str, tokenizer: str) -> ModelCard:
        return ModelCard(name, pool=name, tokenizer=tokenizer, context_length=8, vocab_size=300)

    register_model(rig.client, card("good", SHA), KIT.blob)
    rig.client.hset(keys.MODELS, "without", card("without", "0" * 64).encode())
    rig.client.hset(keys.MODELS, "future", b'{"v":99}')
    vocabularies = Vocabularies(rig.client, nullcontext)
    for _ in range(2):
        vocabularies.prepare()
    assert sorted(record.getMessage().split()[2] for record in caplog.records) == ["future", "without"]  # once each
    rig.client.delete(keys.blob(SHA))
    assert vocabularies.get(SHA).kind == "byte_level"


def test_merge_joins_what_follows() -> None:
    one, two = TokenLogprob(-1.0), TokenLogprob(-2.0)
    chunks = [TokenChunk("r", 3, (5,), (one,), cached_tokens=4), TokenChunk("r", 4, (6,), (two,)), TokenChunk("r", 5)]
    end = TokenChunk("r", 5, (), None, LENGTH)
    assert merge([*chunks, end]) == TokenChunk("r", 3, (5, 6), (one, two), LENGTH, 4)
    assert merge([end]) is end
