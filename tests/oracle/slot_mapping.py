"""Slot mapping as NumPy loops, written from the formulas; shares no code with the package."""

from __future__ import annotations

import numpy as np


def slot_mapping(
    query_start_loc,
    positions,
    block_table,
    *,
    block_size,
    blocks_per_kv_block=1,
    cp_world_size=1,
    cp_rank=0,
    cp_interleave=1,
):
    """Slots i32[T]: of position p in its request, -1 for padding and for tokens of other ranks.

    With W ranks, interleave I, kernel blocks of kb tokens and allocator blocks of kvb: p lies in the virtual block
    p // (kvb * W), at vo = p % (kvb * W); rank (vo // I) % W has it at vo // (W * I) * I + vo % I.
    """
    world, interleave, kv_block = cp_world_size, cp_interleave, block_size * blocks_per_kv_block
    slots = np.full(len(positions), -1, np.int32)
    for request in range(len(query_start_loc) - 1):
        for token in range(query_start_loc[request], query_start_loc[request + 1]):
            virtual_block, inside = divmod(int(positions[token]), kv_block * world)
            if (inside // interleave) % world != cp_rank:
                continue
            offset = inside // (world * interleave) * interleave + inside % interleave
            column = virtual_block * blocks_per_kv_block + offset // block_size
            block = block_table[request][column] if column < len(block_table[request]) else 0
            slots[token] = block * block_size + offset % block_size
    return slots
