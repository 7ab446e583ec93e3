"""The blocks of the K/V pool: which are free, which are owned. Pure Python; the tensors are `kv_cache`'s.

    block table of a sequence   [7, 3, 12]          position p lives in block table[p // block_size],
    pool                        |0|1|2|3|…|7|…|12|  at offset p % block_size

Block 0 is the null block: never handed out, always zeros, what padded block tables point to.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the lowest first, the warmest again
        self._owned = bytearray(num_blocks)
        self._dirty: list[int] = []

    @property
    def usable(self) -> int:
        """Blocks that can be owned at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Raises OutOfBlocks, and takes none, where fewer than `count` are free."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.usable} free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owned[block] = 1
        return taken

    def free(self, blocks: Iterable[int], *, dirty: bool = False) -> None:
        """Take blocks back. `dirty` ones may hold NaN, which a later owner's masked positions would spread
        (0 * NaN is NaN): they must be zeroed before the next forward, see `take_dirty`."""
        for block in blocks:
            assert self._owned[block], f"block {block} is freed and nobody owns it"
            self._owned[block] = 0
            self._free.append(block)
            if dirty:
                self._dirty.append(block)

    def take_dirty(self) -> list[int]:
        """Blocks to be zeroed now; each is told once."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that each block is free, or owned by exactly one of `tables`, and never both."""
        held = [block for table in tables for block in table]
        assert len(set(held)) == len(held), "a block stands in two block tables"
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not set(held) & set(self._free), "a block is free and owned"
        assert NULL_BLOCK not in held, "a sequence owns the null block"
        assert len(held) + len(self._free) == self.usable, (
            f"{self.usable - len(held) - len(self._free)} blocks are lost"
        )
