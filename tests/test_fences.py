"""What each fence, lease check and position check is for, one by one: tests/kit/mutations.py takes each of them out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from headrace.api import watched
from headrace.api.batches.settings import BatchSettings
from headrace.detok.streams import Streams, _follow
from headrace.shared import keys
from headrace.shared.async_job_queue import AsyncJobQueue
from headrace.shared.chunks import Finish, TextChunk, TokenChunk, Usage
from headrace.shared.clients import connect_async
from headrace.shared.errors import Overloaded, ProtocolError
from headrace.shared.failpoints import Failpoints
from headrace.shared.ids import family_from, shard_in
from headrace.shared.job_queue import Claim
from headrace.shared.messages import GenerateJob
from headrace.shared.scripts import Call
from headrace.shared.text_stream import Publish, Published, ShardLease, TextStream
from headrace.shared.token_stream import Append, TokenStream, Written
from headrace.worker.intake import Intake
from headrace.worker.pace import Pace
from headrace.worker.publisher import Publisher
from kit.batches import counts, create, drive, lines
from kit.files_app import files_app
from kit.loopback import serve
from kit.queues import LEASE_S, SHARDS, Rig, a_job, chunk

LENGTH = Finish("length")


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.client.close()


def write(rig: Rig, rid: str, *args: Any, owner: str = "w1", epoch: int = 1, finish: Finish | None = None) -> Written:
    return rig.tokens(owner).append([Append(epoch, chunk(rid, *args, finish=finish))])[rid]


def running(rig: Rig) -> str:
    (rid,) = rig.submit()
    assert [c.job.rid for c in rig.pull()] == [rid]
    return rid


def queued(url: str, *tenants: str, lane: int, tenant: int) -> None:
    """Submit one request of each tenant to the same shard, with these bounds."""

    async def go() -> None:
        client = connect_async(url)
        queue = AsyncJobQueue(client, 1, max_waiting=lane, max_waiting_tenant=tenant)
        try:
            for n, name in enumerate(tenants):
                job = a_job()
                made = GenerateJob(family_from(f"{name} {n}", 1), "m", "m", "sha", (1,), job.sampling, tenant=name)
                await queue.submit(made, deadline_s=60, reader_lease_s=None, keep_s=30)
        finally:
            await client.aclose()

    asyncio.run(go())


# --- append --------------------------------------------------------------------------------------------------------


def test_tokens_that_overlap_what_is_there_are_refused(rig: Rig) -> None:
    rid = running(rig)
    assert write(rig, rid, 0, 5, 6) is Written.OK
    assert write(rig, rid, 1, 6, 7) is Written.MISPLACED
    assert write(rig, rid, 0, 5) is Written.OK, "it was written before"
    assert rig.tokens().read_ids(rid, 2) == [5, 6]


def test_each_append_renews_the_lease(rig: Rig) -> None:
    rid = running(rig)
    for tokens in ((5,), ()):
        rig.client.hset(keys.request(shard_in(rid), rid), "lu", 1)
        assert write(rig, rid, len(tokens) - 1 if tokens else 1, *tokens) is Written.OK
        assert int(rig.state(rid)["lu"]) > 1


def test_what_a_worker_made_of_a_claim_that_it_lost_is_not_written_to_its_next_one(rig: Rig) -> None:
    rid = running(rig)
    rig.expire_lease(rid)
    rig.sweep()
    assert [c.epoch for c in rig.pull()] == [2]
    assert write(rig, rid, 0, 5, epoch=1) is Written.FENCED
    assert write(rig, rid, 0, 6, epoch=2) is Written.OK
    assert rig.tokens().read_ids(rid, 1) == [6]


def test_tokens_of_what_does_not_run_are_refused_whoever_it_names_as_its_owner(rig: Rig) -> None:
    rid = running(rig)
    assert rig.queue.release("w1", [(rid, 1)]) == 1
    rig.client.hset(keys.request(shard_in(rid), rid), "ow", "w1")  # as if giving it back had left it
    assert write(rig, rid, 0, 5) is Written.FENCED
    assert rig.state(rid)["n"] == "0"


def test_nothing_is_written_to_what_has_ended_or_never_was(rig: Rig) -> None:
    rid = running(rig)
    assert write(rig, rid, 0, 5, finish=LENGTH) is Written.OK
    assert write(rig, rid, 1, 6) is Written.ENDED
    assert rig.publish_end(rid, 1) is Published.OK
    assert write(rig, rid, 1, 6) is Written.ENDED
    assert write(rig, family_from("never", SHARDS) + ".0", 0, 5) is Written.ENDED


# --- publish and lease ---------------------------------------------------------------------------------------------


def test_text_is_published_by_the_shards_owner_in_its_epoch_at_its_place(rig: Rig) -> None:
    rid = running(rig)
    shard = shard_in(rid)
    old = rig.lease.take([shard])[shard]
    rig.lease.give_up([shard])
    epoch = rig.lease.take([shard])[shard]
    assert epoch == old + 1
    theirs = TextStream(rig.client, rig.scripts, "other")

    def publish(stream: TextStream, epoch: int, before: int = 0, offset: int = 0) -> Published:
        text = TextChunk(rid, offset, "a", Usage(20, 1))
        return stream.publish(shard, epoch, [Publish(text, before, before + 1, b"")])[rid]

    assert publish(theirs, epoch) is Published.SHARD_LOST
    assert publish(rig.text, old) is Published.SHARD_LOST
    assert publish(rig.text, epoch, before=1) is Published.MISPLACED
    assert publish(rig.text, epoch, offset=1) is Published.MISPLACED
    assert publish(rig.text, epoch) is Published.OK
    assert rig.client.xlen(keys.text(shard, rid)) == 1


def test_a_shard_is_given_up_by_its_owner_alone(rig: Rig) -> None:
    other = ShardLease(rig.scripts, "other", LEASE_S)
    assert rig.lease.take([0]) == {0: 1}
    other.give_up([0])
    assert other.take([0]) == {}
    assert rig.lease.take([0]) == {0: 1}


# --- release, sweep, pull ------------------------------------------------------------------------------------------


def test_a_request_is_given_back_by_who_holds_it(rig: Rig) -> None:
    rid = running(rig)
    assert rig.queue.release("other", [(rid, 1)]) == 0
    assert rig.queue.release("w1", [(rid, 2)]) == 0
    assert rig.state(rid)["st"] == "run"
    assert write(rig, rid, 0, 5, finish=LENGTH) is Written.OK
    rig.client.hset(keys.request(shard_in(rid), rid), "ow", "w1")  # as if the end had left it
    assert rig.queue.release("w1", [(rid, 1)]) == 0
    assert rig.state(rid)["st"] == "gd"


def look_at(rig: Rig, rid: str) -> dict[str, str]:
    """The request after a sweep that was told to look at it, whatever is due."""
    rig.client.zadd(keys.active(shard_in(rid)), {rid: 1})
    rig.sweep()
    return rig.state(rid)


def test_a_lease_that_runs_is_left_alone(rig: Rig) -> None:
    rid = running(rig)
    assert look_at(rig, rid)["st"] == "run"


def test_a_running_request_that_passes_its_deadline_is_told_to_end(rig: Rig) -> None:
    rid = running(rig)
    assert look_at(rig, rid)["cx"] == ""
    rig.client.hset(keys.request(shard_in(rid), rid), "dl", 1)
    assert "deadline" in look_at(rig, rid)["cx"]
    assert write(rig, rid, 0, 5) is Written.CANCELLED


def test_a_waiting_request_that_passes_its_deadline_ends(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.client.hset(keys.request(shard_in(rid), rid), "dl", 1)
    assert look_at(rig, rid)["st"] == "gd"


@pytest.mark.parametrize("queue", ["sq:m", "tq:m:std:default"])
def test_what_does_not_wait_is_not_handed_over(rig: Rig, queue: str) -> None:
    """A list may still name a request that has ended."""
    rid = running(rig)
    assert write(rig, rid, 0, 5, finish=LENGTH) is Written.OK
    shard = shard_in(rid)
    rig.client.lpush(f"{keys.prefix(shard)}{queue}", rid)
    rig.client.zadd(keys.tenants(shard, "m", "std"), {"default": 0})
    assert rig.pull() == []
    assert rig.state(rid)["st"] == "gd"


# --- submit, touch, cancel -----------------------------------------------------------------------------------------


def test_a_lane_is_bounded_over_its_tenants(rig: Rig) -> None:
    queued(rig.url, *(f"t{n}" for n in range(8)), lane=4, tenant=1000)  # one shard's share has room for twice as many
    with pytest.raises(Overloaded):
        queued(rig.url, "late", lane=4, tenant=1000)


def test_a_tenant_is_bounded_within_its_lane(rig: Rig) -> None:
    queued(rig.url, *["many"] * 8, lane=1000, tenant=4)
    with pytest.raises(Overloaded):
        queued(rig.url, *["many"] * 9, lane=1000, tenant=4)
    queued(rig.url, "other", lane=1000, tenant=4)


def test_a_reader_that_left_shortens_no_other_readers_lease(rig: Rig) -> None:
    (rid,) = rig.submit(reader_lease_s=60.0)
    shard = shard_in(rid)
    touch = [Call("touch", shard, (60_000, "new", 0, rid)), Call("touch", shard, (1, "old", 1, rid))]
    assert rig.scripts.call_many(touch) == [[1], [1]]
    state = rig.state(rid)
    assert state["to"] == "new"
    assert int(state["rd"]) - rig.client.time()[0] * 1000 > 30_000


def test_a_reader_of_what_has_ended_changes_nothing(rig: Rig) -> None:
    rid = running(rig)
    write(rig, rid, 0, 5, finish=LENGTH)
    rig.publish_end(rid, 1)
    shard = shard_in(rid)
    assert rig.scripts.call(Call("touch", shard, (60_000, "late", 0, rid))) == [1], "its text may be read"
    assert rig.client.zcard(keys.active(shard)) == 0
    assert rig.state(rid)["to"] == ""


def test_the_first_reason_to_end_stands_and_what_has_ended_has_none(rig: Rig) -> None:
    rid = running(rig)
    for reason in ("first", "second"):
        assert rig.queue.cancel([rid], Finish("abort", message=reason)) == 1
    assert "first" in rig.state(rid)["cx"]
    assert write(rig, rid, 0, 5) is Written.CANCELLED
    assert rig.queue.cancel([rid], Finish("abort")) == 0


# --- their callers -------------------------------------------------------------------------------------------------


class Tokens:
    """A token stream whose flush comes back with what it is told."""

    lease_s = 3.0

    def __init__(self) -> None:
        self.replies: list[tuple[Append, Written]] = []

    def finish_append(self) -> list[tuple[Append, Written]]:
        replies, self.replies = self.replies, []
        return replies

    def begin_append(self, writes: Sequence[Append]) -> None:
        pass

    def read_ids(self, rid: str, count: int) -> list[int]:
        return list(range(count))


class Engine:
    """Knows what it runs, and takes nothing twice."""

    card = SimpleNamespace(pool="m")

    def __init__(self) -> None:
        self.runs: set[str] = set()

    def add(self, job: GenerateJob, produced: Sequence[int] = ()) -> None:
        assert job.rid not in self.runs, "a request cannot run twice"
        self.runs.add(job.rid)

    def abort(self, rid: str) -> None:
        self.runs.discard(rid)


def claim(epoch: int) -> Claim:
    return Claim(replace(a_job(), rid="r-0.0"), epoch, 0, 0)


def hands() -> tuple[Publisher, Intake, Tokens, Engine]:
    """A worker's two hands, around a stream and an engine of a few lines."""
    tokens, engine, pace = Tokens(), Engine(), Pace(3.0)
    publisher = Publisher(cast(Any, engine), cast(Any, tokens), pace, 1)
    adapters = cast(Any, SimpleNamespace(admit=lambda job: None))
    intake = Intake(
        cast(Any, engine), cast(Any, None), cast(Any, tokens), adapters, publisher, pace, owner="w1", consumer="h:0"
    )
    return publisher, intake, tokens, engine


@pytest.mark.parametrize("written", [Written.FENCED, Written.CANCELLED, Written.ENDED, Written.MISPLACED])
def test_a_worker_lets_go_of_what_is_no_longer_its_own(written: Written) -> None:
    publisher, intake, tokens, engine = hands()
    intake._admit(claim(1))
    tokens.replies = [(Append(1, TokenChunk("r-0.0", 0, (5,))), written)]
    publisher.settle()
    assert (publisher.held, engine.runs) == ({}, set())


def test_a_worker_keeps_what_it_has_claimed_again_since() -> None:
    publisher, intake, tokens, engine = hands()
    intake._admit(claim(2))
    tokens.replies = [(Append(1, TokenChunk("r-0.0", 0, (5,))), Written.FENCED)]
    publisher.settle()
    assert engine.runs == {"r-0.0"}
    assert publisher.held["r-0.0"].epoch == 2


def test_a_worker_that_claims_its_own_lost_request_runs_it_once() -> None:
    publisher, intake, _, engine = hands()
    intake._admit(claim(1))
    intake._admit(claim(2))
    assert engine.runs == {"r-0.0"}
    assert publisher.held["r-0.0"].epoch == 2


def test_a_stream_of_another_length_than_its_state_is_not_gone_on_with(rig: Rig) -> None:
    rid = running(rig)
    write(rig, rid, 0, 5, 6)
    with pytest.raises(ProtocolError, match="has 2 tokens on its stream, 3 in its state"):
        TokenStream(rig.client, rig.scripts).read_ids(rid, 3)


def test_pushed_tokens_are_taken_where_they_follow() -> None:
    chunks = [TokenChunk("r", 3, (5, 6)), TokenChunk("r", 5, (7,))]
    assert _follow(chunks, 3)
    assert not _follow(chunks, 2)
    assert not _follow([chunks[0], chunks[0]], 3)
    assert not _follow([], 3)


@pytest.mark.parametrize("published", [Published.MISPLACED, Published.ENDED])
def test_a_detokenizer_forgets_what_stands_elsewhere_than_it_thought(published: Published) -> None:
    text = TextChunk("r-0.0", 0, "a", Usage(1, 1))
    flush = SimpleNamespace(finish_publish=lambda: [(Publish(text, 0, 1, b""), published)])
    streams = Streams(cast(Any, None), cast(Any, flush), cast(Any, None))
    streams._states["r-0.0"] = cast(Any, "a state")
    again = streams.settle()
    assert len(streams) == 0
    assert again == (["r-0.0"] if published is Published.MISPLACED else [])


def test_a_detokenizer_forgets_a_shard_that_another_has_taken() -> None:
    lost, kept = "r-1.0", "r-2.0"
    text = TextChunk(lost, 0, "a", Usage(1, 1))
    flush = SimpleNamespace(finish_publish=lambda: [(Publish(text, 0, 1, b""), Published.SHARD_LOST)])
    streams = Streams(cast(Any, None), cast(Any, flush), cast(Any, None))
    streams.shards = {1, 2}
    streams._states |= {lost: cast(Any, "a state"), "s-1.0": cast(Any, "another"), kept: cast(Any, "a third")}
    assert streams.settle() == []
    assert (streams.shards, [*streams._states]) == ({2}, [kept])


# --- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_change_of_a_batch_whose_answer_is_lost_counts_once(
    redis_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    settings = BatchSettings(redis_url=redis_url, data_dir=str(tmp_path), batch_window=4, max_batch_lines=100)
    with serve(files_app(settings)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        made = create(client, lines(70))
        monkeypatch.setattr(watched, "failpoint", Failpoints(f"watched.written=fail@{nth}").hit)
        drive(settings, made.id)
        batch = client.batches.retrieve(made.id)
    assert (batch.status, counts(batch)) == ("completed", (70, 70, 0))
