"""Block tables: which physical KV block holds which tokens of a request, per KV-cache group.

Block 0 is the null block: a table entry of 0 is never read for a live position and never written.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import struct

NULL_BLOCK = 0
PAD_SLOT_ID = -1
TABLE_WIDTH_MULTIPLE = 128
"""Columns of a table come in multiples of this: the vector width of the GPU kernels that copy its rows."""


@dataclasses.dataclass(frozen=True)
class KVGroup:
    """Layers that share block tables, and how their cache is addressed.

    layers: model layer indices, ascending; position in this tuple is the layer's index in the group's cache.
    window: sliding window of these layers or None.
    block_size: tokens in one block as the kernels see it.
    blocks_per_kv_block: kernel blocks in one block of the allocator (its block size is the product).
    """

    layers: tuple[int, ...]
    window: int | None = None
    block_size: int = 16
    blocks_per_kv_block: int = 1

    @property
    def kv_block_size(self) -> int:
        """Tokens in one block of the allocator."""
        return self.block_size * self.blocks_per_kv_block


class BlockTables(struct.PyTreeNode):
    """block_table: per group i32[R, W], kernel block ids; num_blocks: i32[R, G], columns in use; groups: static."""

    block_table: tuple[jax.Array, ...]
    num_blocks: jax.Array
    groups: tuple[KVGroup, ...] = struct.field(pytree_node=False)

    @property
    def group_of_layer(self) -> dict[int, tuple[int, int]]:
        """Model layer -> (group, index of the layer in the group's cache)."""
        return group_of_layer(self.groups)


def group_of_layer(groups: tuple[KVGroup, ...]) -> dict[int, tuple[int, int]]:
    """Model layer -> (group, index of the layer in the group's cache)."""
    return {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}


def table_width(max_model_len: int, block_size: int, num_lookahead_tokens: int = 0) -> int:
    """Columns of a block table that hold `max_model_len` tokens and the lookahead, rounded up for the kernels."""
    columns = -(-(max_model_len + num_lookahead_tokens) // block_size)
    return -(-columns // TABLE_WIDTH_MULTIPLE) * TABLE_WIDTH_MULTIPLE


def expand_block_ids(block_ids: list[int], blocks_per_kv_block: int) -> list[int]:
    """Allocator block ids -> kernel block ids: id b becomes b*n, ..., b*n + n-1."""
    n = blocks_per_kv_block
    return [b * n + k for b in block_ids for k in range(n)] if n > 1 else list(block_ids)
