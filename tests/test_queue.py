"""The queue's scripts against a real server: claims, fences, fairness, families, cancellation, lifetimes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from headrace.shared import keys
from headrace.shared.chunks import Finish, PromptLogprobs, TextChunk, TokenChunk, TokenLogprob, Usage
from headrace.shared.clients import Client, connect
from headrace.shared.errors import Overloaded
from headrace.shared.ids import family_from, new_family, shard_in
from headrace.shared.messages import Lane
from headrace.shared.model_card import ModelCard
from headrace.shared.registry import Membership, ProcessInfo, processes, register_model, take_slot
from headrace.shared.text_stream import Publish, Published, ShardLease, TextStream
from headrace.shared.token_stream import Append, Written
from kit.queues import LEASE_S, SHARDS, Rig, chunk


@pytest.fixture
def rig(redis_url: str) -> Iterator[Rig]:
    rig = Rig(redis_url)
    yield rig
    rig.client.close()


def test_a_job_goes_from_submit_to_done_and_leaves_nothing_behind(rig: Rig) -> None:
    (rid,) = rig.submit()
    (claim,) = rig.pull()
    assert claim.job.rid == rid
    assert claim.job.input_ids == tuple(range(20))
    assert claim.job.sampling.sampling_seed == 7
    assert (claim.epoch, claim.produced, claim.attempts) == (1, 0, 0)
    tokens = rig.tokens()
    assert tokens.append([Append(1, chunk(rid, 0, 5))]) == {rid: Written.OK}
    assert tokens.append([Append(1, chunk(rid, 1, 6, 2**32, -1, finish=Finish("stop", matched=2)))]) == {
        rid: Written.OK
    }
    assert rig.tokens("x").read({rid: 0})[rid] == [
        chunk(rid, 0, 5),
        chunk(rid, 1, 6, 2**32, -1),
        TokenChunk(rid, 4, finish=Finish("stop", matched=2)),
    ]
    assert rig.publish_end(rid, 4) is Published.OK
    shard = shard_in(rid)
    left = {k.decode() for k in rig.client.keys(f"hr:{{{shard}}}:*")}
    assert keys.tokens(shard, rid) not in left
    assert f"hr:{{{shard}}}:b:{rid[:-2]}" not in left
    assert rig.client.pttl(keys.request(shard, rid)) > 0
    assert rig.client.pttl(keys.text(shard, rid)) > 0
    assert rig.client.zcard(keys.active(shard)) == 0
    assert rig.client.xlen(keys.jobs(shard, "m", "std")) == 0
    assert rig.client.xpending(keys.jobs(shard, "m", "std"), keys.GROUP)["pending"] == 0


def test_submitting_a_family_twice_changes_nothing(rig: Rig) -> None:
    family = family_from("batch 1 line 2", SHARDS)
    first = rig.submit(n=3, rid=family)
    assert rig.submit(n=3, rid=family) == first == [f"{family}.{i}" for i in range(3)]
    claims = rig.pull()
    assert sorted(c.job.rid for c in claims) == first
    assert sorted(c.job.sampling.sampling_seed or 0 for c in claims) == [7, 8, 9]
    assert rig.submit(n=3, rid=family) == first
    assert rig.pull() == []


def test_the_body_of_a_family_goes_with_its_last_choice(rig: Rig) -> None:
    rids = rig.submit(n=2)
    rig.pull()
    body = f"hr:{{{shard_in(rids[0])}}}:b:{rids[0][:-2]}"
    for rid, there in zip(rids, (1, 0), strict=True):
        rig.tokens().append([Append(1, chunk(rid, 0, 5, finish=Finish("length")))])
        assert rig.publish_end(rid, 1) is Published.OK
        assert rig.client.exists(body) == there


def test_every_script_sent_twice_changes_nothing(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    tokens, write = rig.tokens(), Append(1, chunk(rid, 0, 5, 6))
    end = Append(1, chunk(rid, 2, 7, finish=Finish("stop")))
    for append in (write, write, end, end):
        assert tokens.append([append]) == {rid: Written.OK}
    assert [c.token_ids for c in tokens.read({rid: 0})[rid]] == [(5, 6), (7,), ()]
    assert rig.publish_end(rid, 3) is Published.OK
    assert rig.publish_end(rid, 3) is Published.ENDED
    assert rig.client.xlen(keys.text(shard_in(rid), rid)) == 1


def test_a_gap_is_refused(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    assert rig.tokens().append([Append(1, chunk(rid, 1, 5))]) == {rid: Written.MISPLACED}


def test_a_worker_that_lost_its_lease_writes_nothing(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull(owner="w1")
    assert rig.tokens("w1").append([Append(1, chunk(rid, 0, 5))]) == {rid: Written.OK}
    rig.expire_lease(rid)
    rig.sweep()
    assert rig.tokens("w1").append([Append(1, chunk(rid, 1, 6))]) == {rid: Written.FENCED}
    (claim,) = rig.pull(owner="w2")
    assert (claim.epoch, claim.produced, claim.attempts) == (2, 1, 0)
    assert rig.tokens().read_ids(rid, 1) == [5]
    assert rig.tokens("w1").append([Append(1, chunk(rid, 1, 6))]) == {rid: Written.FENCED}
    # The epoch alone is not enough: after a failover it may be granted twice.
    assert rig.tokens("w1").append([Append(2, chunk(rid, 1, 6))]) == {rid: Written.FENCED}
    assert rig.tokens("w2").append([Append(2, chunk(rid, 1, 6))]) == {rid: Written.OK}


def test_no_lease_is_judged_during_the_grace(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    rig.expire_lease(rid)
    rig.sweep(reclaim=False)
    assert rig.state(rid)["st"] == "run"
    rig.expire_lease(rid)
    rig.sweep()
    assert rig.state(rid)["st"] == "q"


def test_three_deaths_without_a_token_are_the_end(rig: Rig) -> None:
    (rid,) = rig.submit()
    for attempt in range(3):
        (claim,) = rig.pull(owner=f"w{attempt}")
        assert claim.attempts == attempt
        rig.expire_lease(rid)
        rig.sweep()
    assert rig.pull() == []
    (end,) = rig.tokens().read({rid: 0})[rid]
    assert end.finish is not None
    assert (end.finish.type, end.finish.status) == ("error", 500)
    assert rig.client.xlen(keys.dead(shard_in(rid))) == 1


def test_a_suspect_is_handed_over_alone_and_only_to_a_quiet_worker(rig: Rig) -> None:
    rids = rig.submit(n=3)
    for attempt in range(2):
        assert len(rig.pull(owner=f"w{attempt}")) == 3
        for rid in rids:
            rig.expire_lease(rid)
        rig.sweep()
    (other,) = rig.submit()
    pull = partial(rig.queue.pull, "m", owner="w2", consumer="host:w2", slots=100, lease_s=LEASE_S)
    assert pull(quiet=False) == []
    seen = []
    for _ in range(3):
        (claim,) = pull(quiet=True)
        assert claim.suspect
        seen.append(claim.job.rid)
    assert sorted(seen) == sorted(rids)
    assert [c.job.rid for c in pull(quiet=False)] == [other]


def test_a_waiting_suspect_can_be_cancelled(rig: Rig) -> None:
    (rid,) = rig.submit()
    for _ in range(2):
        rig.pull()
        rig.expire_lease(rid)
        rig.sweep()
    rig.queue.cancel([rid], Finish("abort"))
    assert rig.pull() == []
    assert rig.client.hget(keys.depth(shard_in(rid), "m"), "std") == b"0"


def test_a_token_clears_the_attempts(rig: Rig) -> None:
    (rid,) = rig.submit()
    for i in range(6):
        (claim,) = rig.pull(owner=f"w{i}")
        rig.tokens(f"w{i}").append([Append(claim.epoch, chunk(rid, i, 5))])
        rig.expire_lease(rid)
        rig.sweep()
    assert rig.state(rid)["st"] == "q"
    assert rig.state(rid)["att"] == "0"


def test_giving_back_is_free_and_goes_first(rig: Rig) -> None:
    (first,) = rig.submit()
    (claim,) = rig.pull()
    shard = shard_in(first)
    while shard_in(rig.submit()[0]) != shard:
        pass
    assert rig.queue.release("w1", [(first, claim.epoch)]) == 1
    assert rig.queue.release("w1", [(first, claim.epoch)]) == 0
    again = rig.pull(owner="w2")
    assert first in [c.job.rid for c in again]
    in_shard = [c.job.rid for c in again if shard_in(c.job.rid) == shard]
    assert in_shard[0] == first
    assert all(c.attempts == 0 for c in again)


def test_a_pull_whose_reply_was_lost_is_given_back(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull(owner="w1")
    assert rig.queue.recover("m", owner="w1", consumer="host:w1", held=[rid]) == 0
    assert rig.queue.recover("m", owner="w1", consumer="host:w1", held=[]) == 1
    assert [c.job.rid for c in rig.pull(owner="w2")] == [rid]


def test_lanes_are_served_in_order(rig: Rig) -> None:
    lanes: tuple[Lane, ...] = ("batch", "std", "rt")
    for lane in lanes * 3:
        rig.submit(lane=lane)
    assert [c.job.lane for c in rig.pull()] == ["rt"] * 3 + ["std"] * 3 + ["batch"] * 3


def test_tenants_share_by_tokens(rig: Rig) -> None:
    def family_in(shard: int) -> str:
        while shard_in(family := new_family(SHARDS)) != shard:
            pass
        return family

    for _ in range(12):
        rig.submit(rid=family_in(0), tenant="many")
    for _ in range(3):
        rig.submit(rid=family_in(0), tenant="few")
    order = [rig.pull(slots=1)[0].job.tenant for _ in range(6)]
    assert order.count("few") == 3


def test_a_tenant_that_idled_earns_no_credit(rig: Rig) -> None:
    def submit(tenant: str) -> None:
        rig.submit(rid=family_from(f"{tenant}{time.monotonic_ns()}", 1), tenant=tenant)

    for _ in range(8):
        submit("steady")
    for _ in range(4):
        rig.pull(slots=1)
    for _ in range(4):
        submit("late")
    order = [rig.pull(slots=1)[0].job.tenant for _ in range(4)]
    assert "steady" in order  # with the credit of its idle time, "late" would have all four


def test_cancel_while_waiting_and_while_running(rig: Rig) -> None:
    (waiting,) = rig.submit()
    rig.queue.cancel([waiting], Finish("abort", message="no more"))
    assert rig.pull() == []
    (end,) = rig.tokens().read({waiting: 0})[waiting]
    assert end.finish == Finish("abort", message="no more")

    (running,) = rig.submit()
    rig.pull()
    assert rig.queue.cancel([running], Finish("abort")) == 1
    assert rig.tokens().append([Append(1, chunk(running, 0, 5))]) == {running: Written.CANCELLED}
    assert rig.tokens().append([Append(1, chunk(running, 1, 6))]) == {running: Written.ENDED}


def test_a_cancelled_request_whose_worker_died_is_not_run_again(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    rig.queue.cancel([rid], Finish("abort"))
    rig.expire_lease(rid)
    rig.sweep()
    assert rig.state(rid)["st"] == "gd"  # at once: there may be no other worker
    assert rig.state(rid)["att"] == "0"


def test_a_cancelled_request_that_is_given_back_ends(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    rig.queue.cancel([rid], Finish("abort"))
    rig.queue.release("w1", [(rid, 1)])
    assert rig.state(rid)["st"] == "gd"


def test_a_reader_that_went_away_ends_its_request(rig: Rig) -> None:
    (rid,) = rig.submit(reader_lease_s=0.05)
    time.sleep(0.1)
    rig.sweep()
    (end,) = rig.tokens().read({rid: 0})[rid]
    assert end.finish is not None
    assert end.finish.type == "abort"


def test_a_deadline_ends_a_waiting_request(rig: Rig) -> None:
    (rid,) = rig.submit(deadline_s=0.02)
    time.sleep(0.05)
    assert rig.pull() == []
    (end,) = rig.tokens().read({rid: 0})[rid]
    assert end.finish is not None
    assert end.finish.status == 504


@pytest.fixture
def full(rig: Rig) -> Iterator[Callable[[], None]]:
    """Fills the store's memory."""
    limit = rig.client.config_get("maxmemory")["maxmemory"]
    yield lambda: rig.client.config_set("maxmemory", 1)
    rig.client.config_set("maxmemory", limit)


def test_a_full_store_refuses_at_the_door_and_finishes_what_it_has(rig: Rig, full: Callable[[], None]) -> None:
    (rid,) = rig.submit()
    full()
    with pytest.raises(Overloaded, match="memory is full"):
        rig.submit()
    (claim,) = rig.pull()
    finish = Finish("length")
    assert rig.tokens().append([Append(claim.epoch, chunk(rid, 0, 5, finish=finish))]) == {rid: Written.OK}
    assert rig.publish_end(rid, 1) is Published.OK
    rig.sweep()


def test_a_full_store_still_knows_who_lives(rig: Rig, full: Callable[[], None]) -> None:
    full()
    card = ModelCard("m", "m", hashlib.sha256(b"tokenizer").hexdigest(), 512, 100)
    register_model(rig.client, card, b"tokenizer")
    member, other = Membership(ProcessInfo("worker")), Membership(ProcessInfo("worker"))
    assert [take_slot(rig.client, m) for m in (member, other)] == [0, 1]
    member.beat(rig.client)
    assert [p.id for p in processes(rig.client)] == [member.info.id]


def test_a_worker_registers_its_model_again_in_a_store_that_was_flushed(rig: Rig) -> None:
    sha = hashlib.sha256(b"tokenizer").hexdigest()
    card = ModelCard("m", "m", sha, 512, 100)
    member = Membership(ProcessInfo("worker", model="m"))
    member.serve(rig.client, card, b"tokenizer")
    for forget in (rig.client.flushall, lambda: rig.client.delete(keys.blob(sha))):
        forget()
        member.beat(rig.client)
        assert ModelCard.decode(rig.client.hget(keys.MODELS, "m")) == card
        assert rig.client.get(keys.blob(sha)) == b"tokenizer"
    rig.client.hset(keys.MODELS, "m", "another worker's card")
    member.beat(rig.client)
    assert rig.client.hget(keys.MODELS, "m") == b"another worker's card"


def test_a_full_queue_refuses(rig: Rig) -> None:
    for i in range(64):
        rig.submit(rid=family_from(str(i), 1))
    with pytest.raises(Overloaded, match="full"):
        rig.submit(rid=family_from("one more", 1))


def test_a_body_that_cannot_be_read_is_answered(rig: Rig) -> None:
    (bad,), (good,) = rig.submit(), rig.submit()
    rig.client.hset(f"hr:{{{shard_in(bad)}}}:b:{bad[:-2]}", "body", b"\x01garbage")
    assert [c.job.rid for c in rig.pull()] == [good]
    (end,) = rig.tokens().read({bad: 0})[bad]
    assert end.finish is not None
    assert end.finish.type == "error"
    ((_, letter),) = rig.client.xrange(keys.dead(shard_in(bad)))
    assert letter[b"r"] == bad.encode()
    assert b"cannot be read" in letter[b"why"]
    assert rig.client.hget(keys.counters(shard_in(bad)), "dead") == b"1"


def test_publish_is_fenced_by_the_shards_lease(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    shard = shard_in(rid)
    epoch = rig.lease.take([shard])[shard]
    other = ShardLease(rig.scripts, "other", LEASE_S)
    assert other.take([shard]) == {}
    rig.lease.give_up([shard])
    assert other.take([shard]) == {shard: epoch + 1}
    write = Publish(TextChunk(rid, 0, "a", Usage(20, 1)), 0, 1, b"")
    assert rig.text.publish(shard, epoch, [write]) == {rid: Published.SHARD_LOST}
    theirs = TextStream(rig.client, rig.scripts, "other")
    assert theirs.publish(shard, epoch + 1, [write]) == {rid: Published.OK}
    assert theirs.publish(shard, epoch + 1, [write]) == {rid: Published.MISPLACED}
    record = theirs.records([rid])[rid]
    assert (record.consumed, record.offset, record.params.prompt_tokens) == (1, 1, 20)


def test_finished_text_stays_within_its_budget(rig: Rig) -> None:
    rids = [rig.submit(rid=family_from(str(i), 1))[0] for i in range(6)]
    rig.pull()
    for rid in rids:
        rig.tokens().append([Append(1, chunk(rid, 0, 5, finish=Finish("stop")))])
        rig.publish_end(rid, 1)
        time.sleep(0.002)  # ends are ordered by the millisecond
    rig.queue.sweep(0, reclaim=True, text_budget=3 * 1028)
    kept = [rid for rid in rids if rig.client.exists(keys.text(0, rid))]
    assert kept == rids[3:]


@pytest.mark.parametrize("break_it", [lambda c: c.script_flush(), lambda c: c.flushall()], ids=["scripts", "all"])
def test_scripts_come_back_after_a_flush(rig: Rig, break_it: Callable[[Client], object]) -> None:
    rig.submit()
    break_it(rig.client)
    (rid,) = rig.submit()
    assert rid in [c.job.rid for c in rig.pull()]


def test_a_flush_in_flight_survives_a_lost_connection(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    tokens = rig.tokens()
    tokens.begin_append([Append(1, chunk(rid, 0, 5))])
    with connect(rig.url) as other:
        other.client_kill_filter(_type="normal", skipme=True)
    assert [written for _, written in tokens.finish_append()] == [Written.OK]
    assert rig.tokens().read_ids(rid, 1) == [5]


def test_logprobs_travel_with_their_tokens(rig: Rig) -> None:
    (rid,) = rig.submit()
    rig.pull()
    sent = TokenChunk(rid, 0, (5, 6), (TokenLogprob(-0.5, ((5, -0.5), (9, -1.5))), TokenLogprob(-2.0)), cached_tokens=3)
    rig.tokens().append([Append(1, sent)])
    assert rig.tokens().read({rid: 0})[rid] == [sent]


def test_logprobs_of_a_prompt_travel_with_the_first_token_or_with_the_end(rig: Rig) -> None:
    told = (TokenLogprob(None), TokenLogprob(-0.5, ((5, -0.5),), ((7, -2.0), (7, -2.0))))
    prompt = PromptLogprobs((4, 5), told)
    (one,), (two,) = rig.submit(), rig.submit()
    rig.pull(slots=2)
    first = TokenChunk(one, 0, (6,), cached_tokens=0, prompt=prompt)
    none = TokenChunk(two, 0, finish=Finish("length"), prompt=prompt)
    written = rig.tokens().append([Append(1, first), Append(1, none)])
    assert set(written.values()) == {Written.OK}
    assert rig.tokens().read({one: 0, two: 0}) == {one: [first], two: [none]}
    assert rig.tokens().append([Append(1, first)]) == {one: Written.OK}  # again: nothing is written twice
    assert rig.tokens().read({one: 0})[one] == [first]


def test_consumers_are_reaped_over_lanes_whose_group_is_gone(rig: Rig) -> None:
    (rid,) = rig.submit()
    (claim,) = rig.pull()
    stream = keys.jobs(shard_in(rid), "m", "std")

    def reaped() -> list[bytes]:
        rig.queue.reap_consumers("m", idle_s=-1)
        return [consumer["name"] for consumer in rig.client.xinfo_consumers(stream, keys.GROUP)]

    assert reaped() == [b"host:w1"], "one that holds something stays"
    rig.queue.release("w1", [(rid, claim.epoch)])
    assert reaped() == []
    rig.client.xgroup_destroy(stream, keys.GROUP)
    rig.queue.reap_consumers("m", idle_s=-1)
    assert rig.queue.recover("m", owner="w1", consumer="host:w1", held=[]) == 0
