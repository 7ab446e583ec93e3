"""The fences, lease checks and position checks of the sources, each as what takes it out: see mutations.py."""

from __future__ import annotations

from dataclasses import dataclass

QUEUE = ("tests/test_queue.py",)
FENCES = ("tests/test_fences.py",)
LOOP = ("tests/test_worker_loop.py",)
FEED = ("tests/test_text_feed.py",)
STREAMS = ("tests/test_api_streams.py",)
BATCHES = ("tests/test_batch_driver.py", "tests/test_batch_states.py")


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` becomes `new` in `file`; one of `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _lua(script: str, what: str, old: str, new: str, tests: tuple[str, ...] = QUEUE + FENCES) -> Mutation:
    return Mutation(f"{script}: {what}", f"shared/lua/{script}.lua", old, new, tests)


MUTATIONS = (
    _lua("append", "epoch", "if f[2] ~= ARGV[i + 1] then", "if false then"),
    _lua("append", "owner", "if h.st ~= 'run' or f[3] ~= owner then", "if h.st ~= 'run' then"),
    _lua("append", "only what runs", "if h.st ~= 'run' or f[3] ~= owner then", "if f[3] ~= owner then"),
    _lua("append", "ended", "if not h.st or h.st == 'done' then return -2 end", "if not h.st then return -2 end"),
    _lua("append", "gone", "if not h.st or h.st == 'done' then", "if h.st == 'done' then"),
    _lua("append", "generated", "if h.st == 'gd' then return from + added <= tonumber(h.n) and 1 or -2 end", ""),
    _lua("append", "position", "if from > n or (from < n and from + added > n) then return -3 end", ""),
    _lua("append", "gap", "if from > n or (from < n", "if (from < n"),
    _lua("append", "overlap", "if from > n or (from < n and from + added > n) then", "if from > n then"),
    _lua("append", "written before", "  if from + added > n then\n    write(", "  if added > 0 then\n    write("),
    _lua("append", "cancellation", "if fin == '' and h.cx ~= '' then fin = h.cx end", ""),
    _lua("append", "renewal", "'n', h.n, 'lu', now + lease)", "'n', h.n)"),
    _lua("publish", "owner of the shard", "local mine = l[1] == ARGV[1] and l[2]", "local mine = l[2]"),
    _lua("publish", "epoch of the shard", "l[1] == ARGV[1] and l[2] == ARGV[2]", "l[1] == ARGV[1]"),
    _lua("publish", "tokens consumed", "if f[2] ~= ARGV[i + 1] or f[3]", "if f[3]"),
    _lua("publish", "bytes published", "or f[3] ~= ARGV[i + 3] then return -3", "then return -3"),
    _lua("publish", "ended", "if not f[1] or f[1] == 'done' then", "if not f[1] then"),
    _lua("lease", "held by another", "if l[3] and tonumber(l[3]) > now then return 0 end", ""),
    _lua("lease", "epoch", "redis.call('HINCRBY', key, 'epoch', 1)", "redis.call('HINCRBY', key, 'epoch', 0)"),
    _lua(
        "lease",
        "given up by its owner",
        "if l[1] == ARGV[1] then redis.call('HSET', key, 'owner', ''",
        "if true then redis.call('HSET', key, 'owner', ''",
    ),
    _lua("release", "owner", "h.st == 'run' and h.ow == ARGV[1] and", "h.st == 'run' and"),
    _lua("release", "epoch", "and (ARGV[i + 1] == '' or h.ep == ARGV[i + 1])", ""),
    _lua("release", "only what runs", "if h and h.st == 'run' and", "if h and"),
    _lua("sweep", "lease", "h.st == 'run' and tonumber(h.lu) <= now and ARGV[2]", "h.st == 'run' and ARGV[2]"),
    _lua("sweep", "grace after an outage", "tonumber(h.lu) <= now and ARGV[2] == '1'", "tonumber(h.lu) <= now"),
    _lua("sweep", "what is charged", "h.n == h.cn and h.att + 1 or 0", "h.att + 1"),
    _lua("sweep", "attempts", "if attempts >= max_attempts then", "if false then"),
    _lua("sweep", "reader lease", "if h.rd ~= '' and tonumber(h.rd) <= now then", "if false then"),
    _lua("sweep", "deadline", "elseif tonumber(h.dl) <= now then", "elseif false then"),
    _lua("sweep", "cancelled and lost", "if h.cx ~= '' then return requeue(rid, h) end", ""),
    _lua("pull", "state", "      if h and h.st == 'q' then\n        --", "      if h then\n        --"),
    _lua("pull", "state of a suspect", "    if h and h.st == 'q' then\n      redis", "    if h then\n      redis"),
    _lua("pull", "epoch", "local epoch = h.ep + 1", "local epoch = tonumber(h.ep)"),
    _lua("pull", "deadline", "elseif tonumber(h.dl) <= now then", "elseif false then"),
    _lua("pull", "owner", "'ow', owner, 'lu'", "'ow', '', 'lu'"),
    _lua(
        "submit",
        "accepted before",
        "if redis.call('EXISTS', P .. 'r:' .. family .. '.0') == 1 then return {'ok'} end",
        "",
    ),
    _lua("submit", "bound of the lane", "if waiting + n > tonumber(ARGV[12]) then", "if false then"),
    _lua("submit", "bound of the tenant", "if own + n > tonumber(ARGV[13]) then", "if false then"),
    _lua("touch", "another reads", " and (ARGV[3] ~= '1' or to == ARGV[2])", ""),
    _lua("touch", "ended", "if st and st ~= 'done' and", "if st and"),
    _lua("cancel", "first reason", "if h.cx == '' then redis", "if true then redis"),
    _lua("cancel", "ended", "elseif h and h.st == 'run' then", "elseif h then"),
    _lua("common", "cancelled and given back", "if h.cx ~= '' then return finish(rid, h, h.cx) end", ""),
    _lua("common", "job entry", "  redis.call('XDEL', jobs, h.jid)\n", ""),
    Mutation(
        "worker: a claim of its own since",
        "worker/publisher.py",
        "if held is not None and held.epoch != write.epoch:",
        "if False:",
        FENCES,
    ),
    Mutation("worker: lets go of what is fenced", "worker/publisher.py", "            self.let_go(rid)\n", "", FENCES),
    Mutation(
        "worker: lets go before it takes again",
        "worker/intake.py",
        "self._publisher.let_go(rid)  # our own",
        "pass  # our own",
        FENCES,
    ),
    Mutation(
        "worker: gives back what a lost pull claimed",
        "worker/loop.py",
        "                self._intake.recover()\n",
        "",
        LOOP,
    ),
    Mutation(
        "worker: settles before it gives back",
        "worker/loop.py",
        "self._publisher.settle()  # an end",
        "pass  # an end",
        LOOP,
    ),
    Mutation(
        "worker: number of published tokens",
        "shared/token_stream.py",
        "        if len(ids) != count:\n",
        "        if False:\n",
        FENCES,
    ),
    Mutation(
        "queue: recovers only what is not held",
        "shared/job_queue.py",
        "if rid not in known:",
        "if True:",
        QUEUE,
    ),
    Mutation(
        "detok: tokens follow",
        "detok/streams.py",
        "if chunk.start != consumed:",
        "if False:",
        FENCES,
    ),
    Mutation(
        "detok: forgets a lost shard",
        "detok/streams.py",
        "            self.forget(shard_in(chunk.rid))\n",
        "            pass\n",
        FENCES,
    ),
    Mutation(
        "detok: forgets a misplaced choice",
        "detok/streams.py",
        "elif result is not Published.OK or chunk.finish is not None:",
        "elif chunk.finish is not None:",
        FENCES,
    ),
    Mutation(
        "feed: a push follows",
        "shared/following.py",
        "        if before != here:\n",
        "        if False:\n",
        FEED,
    ),
    Mutation(
        "feed: a push was had",
        "shared/following.py",
        "Position(chunk.end, chunk.seq) <= here:\n            return True",
        "False:\n            return True",
        FEED,
    ),
    Mutation(
        "feed: what is read was had",
        "shared/following.py",
        "Position(chunk.end, chunk.seq) <= here:\n            return\n",
        "False:\n            return\n",
        FEED,
    ),
    Mutation(
        "feed: what is read follows",
        "shared/following.py",
        "if chunk.offset != here.end:",
        "if False:",
        FEED,
    ),
    Mutation(
        "feed: nothing is taken while in doubt",
        "shared/following.py",
        "rid in self.open and rid not in self.doubted and",
        "rid in self.open and",
        FEED,
    ),
    Mutation(
        "feed: the same text as was shown",
        "shared/following.py",
        "self.met = whole and shown == self._digest",
        "self.met = whole",
        FEED,
    ),
    Mutation(
        "feed: the same text at the same place",
        "shared/following.py",
        "self.met, self.lost = shown == self._digest, shown != self._digest",
        "self.met = True",
        FEED,
    ),
    Mutation(
        "feed: tokens cannot be cut",
        "shared/following.py",
        "whole = there <= 0 or not (chunk.token_ids or chunk.logprobs)",
        "whole = True",
        FEED,
    ),
    Mutation(
        "feed: an end before what was shown",
        "shared/following.py",
        "self.lost = chunk.finish is not None",
        "self.lost = False",
        FEED,
    ),
    Mutation(
        "feed: the store was away",
        "shared/text_feed.py",
        "            following.doubt()\n",
        "            pass\n",
        FEED,
    ),
    Mutation(
        "feed: a store behind us",
        "shared/text_feed.py",
        "elif Position(int(end), int(seq)) < here:",
        "elif False:",
        FEED,
    ),
    Mutation(
        "stream: as far as the client",
        "api/answers/events.py",
        "if chunk.end < seen.end or seen.digest",
        "if seen.digest",
        STREAMS,
    ),
    Mutation(
        "stream: another text before it",
        "api/answers/events.py",
        'or seen.digest not in ("", said):',
        "or False:",
        STREAMS,
    ),
    Mutation(
        "stream: another way to the client's place",
        "api/answers/events.py",
        "if chunk.end > seen.end and (seen.whole or not seen.digest):",
        "if False:",
        STREAMS,
    ),
    Mutation(
        "stream: the client has its end",
        "api/answers/events.py",
        "if seen.whole and seen.digest:",
        "if False:",
        STREAMS,
    ),
    Mutation(
        "stream: tokens cannot be cut",
        "api/answers/events.py",
        "if here < len(text) and (chunk.token_ids or chunk.logprobs):",
        "if False:",
        STREAMS,
    ),
    Mutation(
        "stream: what the client has",
        "api/answers/events.py",
        "if seen is not None and event.place <= seen:",
        "if False:",
        STREAMS,
    ),
    Mutation(
        "reader: what we cannot go on with waits",
        "api/readers.py",
        "max(grace_s, self._lease_s) if grace_s > 0 else 0",
        "0",
        STREAMS,
    ),
    Mutation(
        "connection: what sentinels name is a primary",
        "shared/connections.py",
        'if dict(zip(hello[::2], hello[1::2], strict=True))[b"role"] != b"master":',
        "if False:",
        ("tests/test_redis_primary.py",),
    ),
    Mutation(
        "batch: owner and epoch",
        "api/batches/lease.py",
        "if (batch.owner, batch.epoch) != (owner, epoch):",
        "if False:",
        BATCHES,
    ),
    Mutation(
        "batch: held by another",
        "api/batches/lease.py",
        "if batch.ended or batch.lease_until > now_ms:",
        "if batch.ended:",
        BATCHES,
    ),
    Mutation(
        "batch: completed with all its lines",
        "api/batches/lease.py",
        'and not (outcome == "completed" and batch.unanswered):',
        "and True:",
        BATCHES,
    ),
    Mutation(
        "batch: ends as it was finalized",
        "api/batches/lease.py",
        'if batch.status not in ("finalizing", "cancelling"):',
        "if False:",
        BATCHES,
    ),
    Mutation(
        "batch: a segment counts once",
        "api/batches/lease.py",
        "if batch.last_segment == segment.name:",
        "if False:",
        FENCES,
    ),
)
