"""The blocks of the K/V pool: who owns them, which are free, and what the free ones still hold. Pure Python; the
tensors are `kv_cache`'s.

    block table of a sequence   [7, 3, 12]          position p lives in block table[p // block_size],
    pool                        |0|1|2|3|…|7|…|12|  at offset p % block_size

    free blocks, in the order in which they are given away:

        | hold nothing | hold named K/V: least recently used … most recently used |

A block may have several owners, and a key, which names its content. One that nobody owns keeps its key until it is
given away, and whoever asks for that key before owns it again. So named and empty blocks are one budget.

Block 0 is the null block: never handed out, always zeros, what padded block tables point to.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0


class OutOfBlocks(Exception):
    """The pool cannot give as many blocks as asked; the scheduler preempts or waits."""


class BlockAllocator:
    """Hands out blocks 1 … num_blocks - 1 of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: the pool needs the null block and one more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.evictions = 0  # named blocks given away since the start
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._owners = [0] * num_blocks
        self.dirty: list[int] = []  # must be zeroed before the next forward
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def usable(self) -> int:
        """Blocks that can be owned at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, those with a key among them."""
        return len(self._free)

    @property
    def num_named(self) -> int:
        return len(self._by_key)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """Raises OutOfBlocks, and takes none, where fewer than `count` are free."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.usable} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]
                self.evictions += 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Give blocks that have a key one more owner, who must not write to them."""
        for block in blocks:
            assert block in self._key_of, f"block {block} is shared and nothing says what it holds"
            self._owners[block] += 1
            self._free.pop(block, None)

    def find(self, key: bytes) -> int | None:
        """The block that holds what `key` names."""
        return self._by_key.get(key)

    def name(self, block: int, key: bytes) -> None:
        """Say what an owned block holds from now on. Where another block has that key already, nothing changes."""
        assert self._owners[block], f"block {block} is named and nobody owns it"
        if self._by_key.setdefault(key, block) == block:
            self._key_of[block] = key

    def forget_names(self) -> None:
        """Take all keys away; blocks stay with their owners."""
        self._by_key.clear()
        self._key_of.clear()

    def free(self, blocks: Sequence[int], *, keys: Sequence[bytes] = (), dirty: bool = False) -> None:
        """Take one owner from each block of a table.

        Args:
            keys: what the first blocks of the table hold, as far as it is known.
            dirty: whether the others may hold NaN, which a later owner's masked positions would spread
                (0 * NaN is NaN): they are noted in `dirty`.
        """
        # The last first: of one prefix, the longer part is always given away before what it builds upon.
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            assert self._owners[block], f"block {block} is freed and nobody owns it"
            if index < len(keys):
                self.name(block, keys[index])
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            self._free[block] = None
            if block not in self._key_of:
                self._free.move_to_end(block, last=False)  # the warmest again
                if index >= len(keys):
                    if dirty:
                        self.dirty.append(block)
                elif (twin := self._by_key[keys[index]]) in self._free:
                    self._free.move_to_end(twin)

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that each block has as many owners as `tables` it stands in, and is free where it has none."""
        held = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in held, "a sequence owns the null block"
        for block, owners in held.items():
            assert owners == self._owners[block], f"block {block} has {self._owners[block]} owners, in {owners} tables"
        assert self._free.keys().isdisjoint(held), "a block is free and owned"
        lost = self.usable - len(held) - len(self._free)
        assert lost == 0, f"{lost} blocks are lost"
        assert self._by_key == {key: block for block, key in self._key_of.items()}, "a key leads to another block"
