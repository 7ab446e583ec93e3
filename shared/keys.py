"""Every Redis name and lifetime, and what lies under it. The scripts in `lua/` are the only writers of a request.

All keys of a request carry the hash tag `{s}`: one shard, one slot of a cluster, one script call. A key without a tag
has a slot of its own, and is used alone. A cluster's channels are sharded ones (SPUBLISH), in the slot of their shard.

    key                              type     holds
    hr:schema                        hash     major version, number of shards (fixed when the store is first used)
    hr:{s}:tq:<pool>:<lane>:<tenant> list     waiting rids of one tenant
    hr:{s}:sq:<pool>                 list     waiting rids whose next death is their last, of all lanes
    hr:{s}:tv:<pool>:<lane>          zset     tenants that wait, by virtual token time
    hr:{s}:depth:<pool>              hash     lane → waiting; `clock:<lane>` → virtual time of the last one served;
                                              `taken:<lane>`, `taken_at:<lane>` → taken a second, as of (ms)
    hr:{s}:jobs:<pool>:<lane>        stream   what workers hold now, group `workers`; one entry per running rid
    hr:{s}:new:<pool>                stream   hint for idle workers; trimmed
    hr:{s}:r:<rid>                   hash     the request: fields below
    hr:{s}:b:<family>                hash     `body` (an encoded GenerateJob) and `left`, the choices not yet done
    hr:{s}:t:<rid>                   stream   token ids; entry id <tokens so far>-0, end marker <n>-1
    hr:{s}:x:<rid>                   stream   text; entry id <byte offset after>-<seq>
    hr:{s}:v:<rid>                   bytes    float32 results that need no detokenizer
    hr:{s}:wake                      channel  push of tokens to the detokenizer, or of rids for it to read
    hr:{s}:n:<reader>                channel  push of text to the api replica that reads
    hr:{s}:lease                     hash     the detokenizer that owns this shard: owner, epoch, until
    hr:{s}:act                       zset     unfinished rids by the time (ms) at which they must be looked at again
    hr:{s}:fin                       zset     '<rid> <bytes>' of finished requests, by the time (ms) their text expires
    hr:{s}:finb                      string   bytes of text under `fin`
    hr:{s}:dead                      stream   poison: rid, attempts, last owner; trimmed
    hr:{s}:count                     hash     counters: COUNTERS in overview.py
    hr:models                        hash     name → ModelCard
    hr:blob:<sha256>                 bytes    tokenizers and other files that cards name
    hr:workers                       zset     process ids of every role by last heartbeat (ms)
    hr:worker:<id>                   JSON     what that process says of itself; expires
    hr:slot:<host>:<n>               string   the process that names its consumers <host>:<n>; expires
    hr:ctl:<pool>                    stream   commands to all workers of a pool; `c` a Command; trimmed
    hr:ctlr:<id>                     stream   the workers' answers to one command; `o` an Outcome; expires
    hr:ctll:<pool>                   string   the api request that changes the pool's weights or adapters now; expires
    hr:pool:<pool>                   hash     PoolState, for workers that come later; the last one to leave deletes it
    hr:batch*, hr:file*, hr:upload*  …        on the control Redis: api/batches/store.py, api/files/store.py, uploads.py

Entries of `t:<rid>`: `t` ids in decimal, `lp` their logprobs (JSON), `ct` cached prompt tokens,
`pl` ids and logprobs of the prompt's tokens, in the first entry, `wv` the version of the weights that made these tokens
and those that follow, where it is another than before (at first: `default`); the end marker: `fin`.
Entries of `x:<rid>`: `d` text, `m` the rest of its TextChunk (JSON).

Fields of `r:<rid>` (times in ms of Redis TIME; empty means none)
    v    version of the fields                                               at  when it was accepted
    st   q waiting · run at a worker · gd generated, text not all out · done
    n    tokens produced          c   tokens consumed by the detokenizer      o   bytes of text published
    xk   seq of the last text entry at offset o
    ep   epoch: counts claims      ow  owner (uuid of a worker process)       lu  lease until
    cn   n at the last claim       att claims in a row that made no token     jid entry in `jobs`
    cx   a Finish: end at the next append                                    dl  deadline
    pl, ln, tn  pool, lane, tenant     ct cost in tokens for fairness        sd  seed
    ex   output tokens among ct, until it is known how many they are
    rd   reader lease until        to  reader: the api replica to push to     kp  ms to keep the text once done
    dc   DecodeParams              ds  the detokenizer's state as of c and o
    an   how the api answers a stream (api/plan.py), with choice 0
"""

from __future__ import annotations

from .messages import Lane

SCHEMA_MAJOR = 1
DEFAULT_SHARDS = 8
SHARDS_OF_NODE = 4  # of a cluster's, so that its nodes have about as many each

SCHEMA = "hr:schema"
MODELS = "hr:models"
WORKERS = "hr:workers"
GROUP = "workers"
COMMANDS_KEPT = 128  # a worker reads them between its steps; one that is so far behind has other troubles

# Lifetimes, in ms.
KEEP_WHOLE_MS = 30_000  # text of a finished request that was not streamed: only a repair reads it (a stream's: keep_s)
PROCESS_TTL_MS = 15_000  # a process that says nothing for so long is gone
REPLY_TTL_MS = 60_000  # an answer to a command; who asked reads it at once
POOL_STATE_TTL_MS = 900_000  # where all workers were killed: more than one takes to start again
MAX_ATTEMPTS = 3  # deaths of a request's worker before it published a token; SUSPECT_AT in lua/common.lua is one less


def prefix(shard: int) -> str:
    """What every key of a shard begins with; also the routing key of its scripts."""
    return f"hr:{{{shard}}}:"


def request(shard: int, rid: str) -> str:
    return f"{prefix(shard)}r:{rid}"


def tokens(shard: int, rid: str) -> str:
    return f"{prefix(shard)}t:{rid}"


def text(shard: int, rid: str) -> str:
    return f"{prefix(shard)}x:{rid}"


def wake(shard: int) -> str:
    return f"{prefix(shard)}wake"


def lease(shard: int) -> str:
    return f"{prefix(shard)}lease"


def active(shard: int) -> str:
    return f"{prefix(shard)}act"


def dead(shard: int) -> str:
    return f"{prefix(shard)}dead"


def counters(shard: int) -> str:
    return f"{prefix(shard)}count"


def new_jobs(shard: int, pool: str) -> str:
    return f"{prefix(shard)}new:{pool}"


def jobs(shard: int, pool: str, lane: Lane) -> str:
    return f"{prefix(shard)}jobs:{pool}:{lane}"


def tenants(shard: int, pool: str, lane: str) -> str:
    return f"{prefix(shard)}tv:{pool}:{lane}"


def suspects(shard: int, pool: str) -> str:
    return f"{prefix(shard)}sq:{pool}"


def depth(shard: int, pool: str) -> str:
    return f"{prefix(shard)}depth:{pool}"


def reader_channel(shard: int, reader: str) -> str:
    return f"{prefix(shard)}n:{reader}"


def blob(sha256: str) -> str:
    return f"hr:blob:{sha256}"


def worker(process_id: str) -> str:
    return f"hr:worker:{process_id}"


def slot(host: str, number: int) -> str:
    return f"hr:slot:{host}:{number}"


def control(pool: str) -> str:
    return f"hr:ctl:{pool}"


def control_replies(command_id: str) -> str:
    return f"hr:ctlr:{command_id}"


def control_lock(pool: str) -> str:
    return f"hr:ctll:{pool}"


def pool_state(pool: str) -> str:
    return f"hr:pool:{pool}"
