"""Request ids: made here, never a client's, never used again.

    family   0192f3a4b5c67d8e9f0a1b2c3d4e5f60-5      32 hex digits of a UUIDv7 (or of a hash), then the shard
    rid      0192f3a4b5c67d8e9f0a1b2c3d4e5f60-5.0    the family and the choice's index

The shard stands in the id, so that whoever holds one finds its keys without knowing how many shards there are.
"""

from __future__ import annotations

import hashlib
import os
import time
from binascii import crc_hqx

from .errors import ProtocolError


def shard_of(text: str, shards: int) -> int:
    """CRC16 (CCITT, as Redis Cluster's) of `text`, modulo `shards`."""
    return crc_hqx(text.encode(), 0) % shards


def new_family(shards: int) -> str:
    """A new id, sorted by time: 48 bits of Unix milliseconds, then 74 random bits (RFC 9562, version 7)."""
    value = (int(time.time() * 1000) & ((1 << 48) - 1)) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text}-{shard_of(text, shards)}"


def family_from(seed: str, shards: int) -> str:
    """The id that `seed` always gives: a repeated submit of the same work finds the first one."""
    text = hashlib.sha256(seed.encode()).hexdigest()[:32]
    return f"{text}-{shard_of(text, shards)}"


def choices(family: str, n: int) -> tuple[str, ...]:
    """The rids of a family's `n` choices."""
    return tuple(f"{family}.{i}" for i in range(n))


def shard_in(rid: str) -> int:
    """The shard of a rid or a family.

    Raises:
        ProtocolError: `rid` is not one of ours.
    """
    head, dash, tail = rid.partition("-")
    shard = tail.partition(".")[0]
    if not (head.isalnum() and dash and shard.isascii() and shard.isdigit()):
        raise ProtocolError(f"{rid!r} is not a request id")
    return int(shard)
