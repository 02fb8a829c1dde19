"""Slot mapping: the physical KV-cache slot into which each token's key and value are written.

A slot is `block * block_size + offset`, int32. Padding tokens, and tokens that another context-parallel rank owns, get
PAD_SLOT_ID (-1), which every consumer must mask: a negative index wraps in JAX, also with mode="drop".

The rule is vLLM's (`compute_slot_mapping`): with W ranks, interleave I, allocator blocks of `kvb` tokens and kernel
blocks of `kb` tokens (kvb = n * kb), position p lies in virtual block p // (kvb * W), belongs to rank (vo // I) % W
where vo = p % (kvb * W), and has the local offset (vo // (W * I)) * I + vo % I inside that block.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.state.block_tables import NULL_BLOCK, PAD_SLOT_ID

Mode = Literal["token_to_kv_slot", "none"]


def slot_mapping(
    query_start_loc: Int32[Array, "B1"],
    positions: Int32[Array, "T"],
    block_table: Int32[Array, "B W"],
    *,
    block_size: int,
    blocks_per_kv_block: int = 1,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    mode: Mode = "token_to_kv_slot",
    implementation: Implementation = None,
) -> Int32[Array, "T"]:
    """Slot of each token, i32[T].

    query_start_loc: i32[B + 1], non-decreasing; tokens from query_start_loc[B] on are padding.
    positions: i32[T], absolute position of each token in its request.
    block_table: i32[B, W], kernel block ids of each request of the batch; a position past it gets the null block.
    block_size: tokens in a kernel block. mode "none": no slots (recurrent-state groups), all PAD_SLOT_ID.

    Raises ValueError for a rank outside the world or an interleave that does not divide the allocator's block.
    """
    if not 0 <= cp_rank < cp_world_size:
        raise ValueError(f"cp_rank {cp_rank} is outside a world of {cp_world_size}")
    if cp_interleave < 1 or (block_size * blocks_per_kv_block) % cp_interleave:
        raise ValueError(f"cp_interleave {cp_interleave} must divide the block of {block_size * blocks_per_kv_block}")
    if mode == "none":
        return jnp.full(positions.shape, PAD_SLOT_ID, jnp.int32)
    if mode != "token_to_kv_slot":
        raise ValueError(f"unknown slot mapping mode {mode!r}; use 'token_to_kv_slot' or 'none'")
    run = slot_mapping_xla
    if resolve("slot_mapping", implementation) == "mosaic":
        from jaxrunner.pallas.slot_mapping_mosaic import slot_mapping_mosaic as run
    return run(
        query_start_loc,
        positions,
        block_table,
        block_size=block_size,
        blocks_per_kv_block=blocks_per_kv_block,
        cp_world_size=cp_world_size,
        cp_rank=cp_rank,
        cp_interleave=cp_interleave,
    )


def slot_mapping_xla(
    query_start_loc: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    *,
    block_size: int,
    blocks_per_kv_block: int,
    cp_world_size: int,
    cp_rank: int,
    cp_interleave: int,
) -> jax.Array:
    """The specification."""
    tokens = jnp.arange(positions.shape[0], dtype=jnp.int32)
    live = tokens < query_start_loc[-1]
    request = request_of_token(query_start_loc, positions.shape[0])
    column, offset, local = locate(
        jnp.where(live, positions, 0), block_size, blocks_per_kv_block, cp_world_size, cp_rank, cp_interleave
    )
    # An index past the table would be clamped to its last column: the write would hit a block that holds other tokens.
    block = jnp.where(column < block_table.shape[1], block_table[request, column], NULL_BLOCK)
    slots = block * block_size + offset
    return jnp.where(live & local, slots, PAD_SLOT_ID)


def request_of_token(query_start_loc: jax.Array, num_tokens: int) -> jax.Array:
    """Batch index of each token's request, i32[num_tokens]; padding tokens get some index inside the batch."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.searchsorted(query_start_loc, tokens, side="right", method="compare_all") - 1
    return jnp.clip(request, 0, query_start_loc.shape[0] - 2).astype(jnp.int32)


def locate(position, block_size, blocks_per_kv_block, cp_world_size, cp_rank, cp_interleave):
    """(table column, offset in the kernel block, owned by this rank) of a position; arithmetic only."""
    virtual = block_size * blocks_per_kv_block * cp_world_size
    inside = position % virtual
    offset = inside // (cp_world_size * cp_interleave) * cp_interleave + inside % cp_interleave
    column = position // virtual * blocks_per_kv_block + offset // block_size
    return column, offset % block_size, inside // cp_interleave % cp_world_size == cp_rank


def context_parallel_seq_lens(seq_lens: jax.Array, *, cp_world_size: int, cp_rank: int, cp_interleave: int = 1):
    """Keys of each request that this rank holds, i32[B] (vLLM's `dcp_local_seq_lens`)."""
    round_size = cp_world_size * cp_interleave
    rest = seq_lens % round_size - cp_rank * cp_interleave
    return seq_lens // round_size * cp_interleave + jnp.clip(rest, 0, cp_interleave)
