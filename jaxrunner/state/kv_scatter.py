"""Writes into a KV cache by index, in place when it is donated, whatever type it is stored in.

XLA scatters no float8: it would widen the whole cache, and narrow it again. On the CPU, where a view of the cache as
bytes would be a copy of it too, rows are written one after the other; elsewhere they are scattered as bytes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.state.kv_dtype import FLOAT8


def write_rows(
    cache: jax.Array, layer: jax.Array, which: int, block: jax.Array, offset: jax.Array, rows: jax.Array
) -> jax.Array:
    """The cache [L, 2, N, P, KVH, D] with rows[t] at (layer, which, block[t], offset[t]); block N writes nothing.

    rows: [T, KVH, D] of the cache's dtype. block, offset: i32[T], never negative.
    """
    if cache.dtype != FLOAT8:
        return cache.at[layer, which, block, offset].set(rows, mode="drop")
    if jax.default_backend() != "cpu":
        bits = _bytes(cache).at[layer, which, block, offset].set(_bytes(rows), mode="drop")
        return lax.bitcast_convert_type(bits, FLOAT8)
    order, count = _live_first(block, cache.shape[2])

    def write(i, cache):
        t = order[i]
        start = (layer, which, block[t], offset[t], 0, 0)
        return lax.dynamic_update_slice(cache, rows[t][None, None, None, None], start)

    return lax.fori_loop(0, count, write, cache)


def write_blocks(cache: jax.Array, ids: jax.Array, data: jax.Array) -> jax.Array:
    """The cache [L, 2, N, P, KVH, D] with data[:, :, i] as its block ids[i] in every layer; block N writes nothing.

    ids: i32[n] or more axes, never negative. data: [L, 2, *ids.shape, P, KVH, D] of the cache's dtype, or 0.
    """
    if cache.dtype != FLOAT8:
        return cache.at[:, :, ids].set(data, mode="drop")
    data = jnp.broadcast_to(jnp.asarray(data, FLOAT8), (*cache.shape[:2], *ids.shape, *cache.shape[3:]))
    if jax.default_backend() != "cpu":
        bits = _bytes(cache).at[:, :, ids].set(_bytes(data), mode="drop")
        return lax.bitcast_convert_type(bits, FLOAT8)
    data, ids = data.reshape(*cache.shape[:2], -1, *cache.shape[3:]), ids.reshape(-1)
    order, count = _live_first(ids, cache.shape[2])

    def write(i, cache):
        slab = lax.dynamic_slice_in_dim(data, order[i], 1, axis=2)
        return lax.dynamic_update_slice_in_dim(cache, slab, ids[order[i]], axis=2)

    return lax.fori_loop(0, count, write, cache)


def _bytes(array: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(array, jnp.uint8)


def _live_first(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(the order that puts the entries that are in range first, how many they are)."""
    live = index < size
    return jnp.argsort(~live, stable=True).astype(jnp.int32), live.sum(dtype=jnp.int32)
