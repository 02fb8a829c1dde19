"""The KV blocks of a cache: free, held by requests (counted), or free but still holding a prefix worth reusing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrunner.errors import CapacityError, InvariantError
from jaxrunner.state.block_tables import NULL_BLOCK


class BlockPool:
    """Allocator blocks 1..num_blocks-1; block 0 is the null block.

    A block whose contents are registered under a hash stays findable after its last holder let go of it, until it is
    handed out again. Blocks are handed out least recently freed first, so a reusable prefix lives longest.
    All KV-cache groups of a model use the same block ids.
    """

    def __init__(self, num_blocks: int):
        self.num_usable = num_blocks - 1
        self.ref_count = np.zeros(num_blocks, np.int32)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each held once. Raises CapacityError and takes nothing if there are fewer."""
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks asked for, {len(self._free)} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
        self.ref_count[blocks] += 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found by their hash once more."""
        for block in blocks:
            self.ref_count[block] += 1
            self._free.pop(block, None)

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of a request's blocks, given in table order: the end of a sequence is reused before its beginning."""
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block] < 0:
                raise InvariantError(f"KV block {block} was freed more often than it was held")
            if self.ref_count[block] == 0:
                self._free[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a full block findable. A second block with the same contents stays private."""
        if digest not in self._block_of:
            self._forget(block)
            self._hash_of[block], self._block_of[digest] = digest, block

    def longest_prefix(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest run of `digests`, from the first on, that is still there."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def reset_prefixes(self) -> None:
        """Forget all contents, e.g. because the weights changed."""
        self._hash_of.clear()
        self._block_of.clear()

    def check_idle(self) -> None:
        """Raises InvariantError, naming the blocks, if any is held although no request lives."""
        if len(self._free) != self.num_usable or self.ref_count.any():
            leaked = np.flatnonzero(self.ref_count).tolist()
            raise InvariantError(f"{self.num_usable - len(self._free)} KV blocks leaked: {leaked[:20]}")

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
