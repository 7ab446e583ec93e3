"""The prefix cache: a sequence that begins as another did finds that one's K/V instead of computing it.

    tokens          | t0 … t15 | t16 … t31 | t32 …        only full blocks are shared, so that nobody writes to one
    keys    seed ──────► k0 ───────► k1                   k_i = blake2b(k_{i-1}, ids of block i, media begun in it)

A key therefore stands for everything before the end of its block, and for the seed: adapter, tenant salt and weight
version. What an attacker could make collide is 128 bits of blake2b, so that no key leads to K/V of another's tokens.

What is found is content: it makes no difference whether a prompt of another request left it, a sibling among `n`
choices, or the sequence itself before it was preempted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ids
from hashlib import blake2b

from .blocks import BlockAllocator
from .sequence import Sequence

_KEY_SIZE = 16


def cache_seed(*parts: str) -> bytes:
    """What the chain of keys begins with. Sequences of different seeds never share."""
    digest = blake2b(digest_size=_KEY_SIZE)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_key(parent: bytes, ids: Ids[int], media: Ids[tuple[int, bytes]] = ()) -> bytes:
    """The key of a full block.

    Args:
        parent: the key of the block before, or the seed.
        ids: its token ids.
        media: (offset within the block, content hash) of each image or other input that begins in it.
    """
    digest = blake2b(parent, digest_size=_KEY_SIZE)
    digest.update(array("i", ids).tobytes())
    for offset, content in media:
        digest.update(offset.to_bytes(4, "little") + len(content).to_bytes(4, "little") + content)
    return digest.digest()


class PrefixCache:
    """Finds and names the blocks of sequences.

    Args:
        enabled: where not, nothing is ever found or named.
    """

    def __init__(self, blocks: BlockAllocator, *, enabled: bool = True) -> None:
        self._blocks = blocks
        self._enabled = enabled
        self._generation = 0  # K/V of an earlier one are never named
        self._computing: dict[bytes, Sequence] = {}  # blocks of prompts on their way
        self.queried_tokens = 0  # tokens of sequences when they were admitted, since the start
        self.hit_tokens = 0  # those of them that were found

    def match(self, sequence: Sequence) -> list[int]:
        """The blocks that hold a sequence's first tokens: not its last one, whose logits must be computed."""
        hits: list[int] = []
        if self._enabled and sequence.reads_cache:
            for index in range((len(sequence.token_ids) - 1) // self._blocks.block_size):
                block = self._blocks.find(self._key(sequence, index))
                if block is None:
                    break
                hits.append(block)
        return hits

    def worth_waiting(self, sequence: Sequence, hits: int) -> bool:
        """Whether most of what `sequence` lacks beyond its first `hits` blocks is being computed for others that go
        before it, as the prompt of `n` choices that arrive together: it will be a hit soon."""
        if not (self._computing and sequence.reads_cache):
            return False
        size = self._blocks.block_size
        soon, last = hits, (len(sequence.token_ids) - 1) // size
        while soon < last:
            other = self._computing.get(self._key(sequence, soon))
            if other is None or other.order > sequence.order:
                break
            soon += 1
        return 2 * (soon - hits) * size > len(sequence.token_ids) - hits * size

    def admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Make a sequence, which has no blocks, an owner of what `match` found."""
        self._blocks.share(hits)
        sequence.block_table = list(hits)
        sequence.num_named = len(hits)
        sequence.num_computed = len(hits) * self._blocks.block_size
        sequence.cache_generation = self._generation
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt_tokens)
        self.queried_tokens += len(sequence.token_ids)
        self.hit_tokens += sequence.num_computed
        if self._enabled:
            for index in range(len(hits), len(sequence.token_ids) // self._blocks.block_size):
                self._computing.setdefault(self._key(sequence, index), sequence)

    def register(self, sequence: Sequence) -> None:
        """Name the full blocks of a sequence, whose K/V are computed and known to be finite."""
        full = sequence.num_computed // self._blocks.block_size
        if sequence.num_named >= full or not self._registers(sequence):
            return
        for index in range(sequence.num_named, full):
            key = self._key(sequence, index)
            self._blocks.name(sequence.block_table[index], key)
            self._arrived(sequence, key)
        sequence.num_named = full

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's blocks from it. What they hold stays to be found."""
        for key in sequence.block_keys[sequence.num_named :]:
            self._arrived(sequence, key)
        known = sequence.num_named if self._registers(sequence) else 0
        keys = sequence.block_keys[:known]
        self._blocks.free(sequence.block_table, keys=keys, dirty=sequence.writing is not None)
        sequence.block_table = []
        sequence.num_named = sequence.num_computed = 0
        sequence.writing = sequence.taint = None

    def flush(self) -> int:
        """Forget everything. What runs goes on with its own blocks, and these are never found by others.

        Returns:
            How many tokens of K/V were known.
        """
        known = self._blocks.num_named * self._blocks.block_size
        self._generation += 1
        self._blocks.forget_names()
        self._computing.clear()
        return known

    def check_integrity(self, running: Ids[Sequence]) -> None:
        """Assert that whatever is said to be on its way is."""
        assert set(self._computing.values()) <= set(running), "a sequence that does not run is waited for"

    def _registers(self, sequence: Sequence) -> bool:
        return self._enabled and sequence.cache_generation == self._generation

    def _arrived(self, sequence: Sequence, key: bytes) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """The key of a sequence's block; those up to the newest one asked for are kept."""
        keys, size = sequence.block_keys, self._blocks.block_size
        while len(keys) <= index:
            start, end = len(keys) * size, (len(keys) + 1) * size
            media = [(at - start, content) for at, content in sequence.media if start <= at < end]
            keys.append(block_key(keys[-1] if keys else sequence.cache_seed, sequence.token_ids[start:end], media))
        return keys[index]
