"""The free KV blocks of one KV-cache group."""

from __future__ import annotations

from jaxrunner.errors import CapacityError
from jaxrunner.state.block_tables import NULL_BLOCK


class BlockPool:
    """Allocator blocks 1..num_blocks-1; block 0 is the null block."""

    def __init__(self, num_blocks: int):
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks asked for, {len(self._free)} free")
        return [self._free.pop() for _ in range(count)]

    def free(self, blocks: list[int]) -> None:
        """Give blocks back; the ones given last are handed out first."""
        self._free.extend(reversed(blocks))
