"""Starts one detokenizer: checks Redis, loads the tokenizers of the registered models, works."""

from __future__ import annotations

import logging
import uuid

from ..shared import keys, logs
from ..shared.clients import Client, connect
from ..shared.errors import ProtocolError
from ..shared.job_queue import JobQueue
from ..shared.messages import ModelCard
from ..shared.registry import Membership, ProcessInfo
from ..shared.scripts import Scripts
from ..shared.signals import StopSignal
from ..shared.store import open_store, parse_bytes
from ..shared.text_stream import ShardLease, TextStream
from ..shared.token_stream import TokenStream
from .loop import Detokenizer
from .peers import Peers
from .settings import DetokSettings
from .shards import Shards

log = logging.getLogger(__name__)


def run(settings: DetokSettings) -> int:
    """Run until SIGTERM; the exit status is 0.

    Raises:
        ConfigError: a setting or Redis is not as it must be; nothing was registered.
    """
    logs.setup("detok", settings.log_level, settings.log_json)
    stop = StopSignal()
    store = open_store(settings)
    budget = store.text_budget
    if settings.text_budget:
        budget = parse_bytes(settings.text_budget, "--text-budget (HEADRACE_TEXT_BUDGET)") // store.shards
    client = connect(settings.redis_url, "detok")
    member = Membership(ProcessInfo("detok"))
    member.beat(client)

    owner = uuid.uuid4().hex
    scripts = Scripts(client, on_outage=lambda error: detokenizer.note_outage(error))
    lease = ShardLease(scripts, owner, settings.shard_lease_s)
    peers = Peers(client, member.info.id, settings.shard_lease_s)
    detokenizer = Detokenizer(
        Shards(client, lease, peers, store.shards, settings.shard_lease_s),
        JobQueue(client, scripts, store.shards),
        TokenStream(client, scripts),
        TextStream(client, scripts, owner),
        client,
        member,
        lease_s=settings.lease_s,
        text_budget=budget,
        slice_requests=settings.slice_requests,
        stop=stop,
    )
    detokenizer.warm(_registered_tokenizers(client))
    log.info("decoding for %s, %d shards in all", store.server, store.shards)
    detokenizer.run()
    return 0


def _registered_tokenizers(client: Client) -> set[str]:
    tokenizers = set()
    for name, card in client.hgetall(keys.MODELS).items():
        try:
            tokenizers.add(ModelCard.decode(card).tokenizer)
        except ProtocolError as e:  # registered by another release, whose requests its own roles serve
            log.warning("the card of %s is left alone: %s", name.decode(), e)
    return tokenizers
