"""KV write: the keys and values of a step enter the paged cache at their slots, in place when the cache is donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from jaxrunner.errors import NotBuiltError
from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.state.kv_cache import KEY, VALUE
from jaxrunner.state.kv_dtype import FLOAT8, FLOAT8_MAX, is_float8, to_bytes


def kv_write(
    blocks: Num[Array, "L 2 N P KVH D"],
    layer: Int32[Array, ""],
    k: Float[Array, "T KVH D"],
    v: Float[Array, "T KVH D"],
    slot_mapping: Int32[Array, "T"],
    *,
    kv_scales: Float32[Array, "L 2"] | None = None,
    implementation: Implementation = None,
) -> Num[Array, "L 2 N P KVH D"]:
    """The cache with row t of k and v written at slot_mapping[t] of `layer`; negative slots write nothing.

    blocks: one KV-cache group, see `KVCache`. layer: index inside the group. The slot is split into (block, offset):
    a flat index over the cache would overflow 32 bits. kv_scales: of a float8 cache (ones by default), see `quantised`.

    Raises ImplementationError where a named implementation cannot run or take this case.
    """
    from jaxrunner.pallas import kv_write_mosaic as mosaic

    kv_scales = scales_for(blocks, kv_scales)
    run: Callable[..., Any] = kv_write_xla
    reason = mosaic.reason_against(blocks)
    if resolve("kv_write", implementation, {"mosaic": reason}) == "mosaic":
        run = mosaic.kv_write_mosaic
    return run(blocks, layer, k, v, slot_mapping, kv_scales=kv_scales)


def kv_write_xla(blocks, layer, k, v, slot_mapping, *, kv_scales=None):
    """See `kv_write`; this is its specification."""
    num_blocks, block_size = blocks.shape[2:4]
    # Padding goes past the last block: mode="drop" drops that, but would wrap a negative index.
    block = jnp.where(slot_mapping < 0, num_blocks, slot_mapping // block_size)
    offset = slot_mapping % block_size
    for which, rows in ((KEY, k), (VALUE, v)):
        rows = rows.astype(blocks.dtype) if kv_scales is None else to_bytes(quantised(rows, kv_scales[layer, which]))
        blocks = blocks.at[layer, which, block, offset].set(rows, mode="drop")
    return blocks


@jax.custom_jvp
def quantised(rows: jax.Array, scale: jax.Array) -> jax.Array:
    """What a float8 cache stores for `rows`, as numbers: rows * (1 / scale) in float32, clipped to +-448, rounded."""
    scaled = rows.astype(jnp.float32) * (1.0 / scale)
    return jnp.clip(scaled, -FLOAT8_MAX, FLOAT8_MAX).astype(FLOAT8)


@quantised.defjvp
def _refuse_gradient(primals, tangents):
    raise NotBuiltError("no gradient passes a float8 cache; use kv_cache_dtype='float32' to differentiate")


def scales_for(blocks: Any, kv_scales: Any) -> Any:
    """The scales that an op works with: ones where a float8 cache has none, None for any other cache.

    Raises ValueError for scales of a cache that is not float8, which would be ignored.
    """
    if not is_float8(blocks):
        if kv_scales is not None:
            raise ValueError(f"kv_scales are for a float8 cache (bytes as uint8), not for one of {blocks.dtype}")
        return None
    return jnp.ones((blocks.shape[0], 2), jnp.float32) if kv_scales is None else kv_scales
