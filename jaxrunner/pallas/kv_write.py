"""KV write: the keys and values of a step enter the paged cache at their slots, in place when the cache is donated."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.state.kv_cache import KEY, VALUE


def kv_write(
    blocks: Float[Array, "L 2 N P KVH D"],
    layer: Int32[Array, ""],
    k: Float[Array, "T KVH D"],
    v: Float[Array, "T KVH D"],
    slot_mapping: Int32[Array, "T"],
    *,
    implementation: Implementation = None,
) -> Float[Array, "L 2 N P KVH D"]:
    """The cache with row t of k and v written at slot_mapping[t] of `layer`; negative slots write nothing.

    blocks: one KV-cache group, see `KVCache`. layer: index inside the group. The slot is split into (block, offset):
    a flat index over the cache would overflow 32 bits.

    Raises ImplementationError where a named implementation cannot run or take this case.
    """
    from jaxrunner.pallas import kv_write_mosaic as mosaic

    if resolve("kv_write", implementation, mosaic.reason_against(blocks)) == "mosaic":
        return mosaic.kv_write_mosaic(blocks, layer, k, v, slot_mapping)
    return kv_write_xla(blocks, layer, k, v, slot_mapping)


def kv_write_xla(blocks, layer, k, v, slot_mapping):
    """See `kv_write`; this is its specification."""
    num_blocks, block_size = blocks.shape[2:4]
    # Padding goes past the last block: mode="drop" drops that, but would wrap a negative index.
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    blocks = blocks.at[layer, KEY, block, offset].set(k.astype(blocks.dtype), mode="drop")
    return blocks.at[layer, VALUE, block, offset].set(v.astype(blocks.dtype), mode="drop")
