"""One CTA of decode attention with queries as the rows of the tensor core's tile: up to 64 of them."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_combine_mosaic import deliver
from jaxrunner.pallas.attention_mosaic import (
    NEG_INF,
    TILE_ROWS,
    by_scale,
    clear_tail,
    finish,
    load_rows,
    spread,
    store_rows,
    visible,
    widen,
)
from jaxrunner.pallas.attention_shares import Arrays, Call, Keys, Place
from jaxrunner.state.kv_cache import KEY, VALUE


def stages(ctas: int) -> int:
    """Tiles of keys, and of values, in flight. ctas: with one share a request."""
    return 2


def ctas_of_sm(ctas: int) -> int:
    """That fit one."""
    return 2


def scratch(call: Call) -> list[Any]:
    """Scratch of a CTA, in the order in which `attend` takes it."""
    geometry, stages = call.geometry, call.stages
    tile = (geometry.tile_kv, geometry.head_dim)
    types = [
        compat.swizzled_smem((TILE_ROWS, geometry.head_dim), geometry.dtype),
        compat.swizzled_smem((stages, *tile), geometry.cache_dtype),
        compat.swizzled_smem((stages, *tile), geometry.cache_dtype),
        compat.row_major_smem((TILE_ROWS, geometry.columns), jnp.float32),
        compat.barriers(stages, geometry.pages_of_tile),
        compat.barriers(stages, geometry.pages_of_tile),
        compat.barriers(),
    ]
    if geometry.float8:
        types += [compat.swizzled_smem(tile, geometry.dtype)] * 2
    if compat.interpreted():
        types.append(compat.swizzled_smem((TILE_ROWS, geometry.tile_kv), geometry.dtype))
    return types


def attend(call: Call, arrays: Arrays, scratch: tuple[Any, ...], place: Place) -> None:
    """The result of one share, into `arrays.out`, or into the partial results where the request has more shares."""
    geometry, options, stages = call.geometry, call.options, call.stages
    window, tokens, tile_kv, share = options.window, call.tokens, geometry.tile_kv, place.share
    q_tile, k_tiles, v_tiles, staging, k_full, v_full, reusable, *more = scratch
    wide, p_tile = (more[:2], more[2:]) if geometry.float8 else ([], more)
    keys = Keys(call, arrays, place)

    def fetch(i):
        slot = lax.rem(i, jnp.int32(stages))
        for tiles, full, values in ((k_tiles, k_full, False), (v_tiles, v_full, True)):
            for j, page in enumerate(keys.pages(i, values=values)):
                compat.copy_in(page, tiles.at[slot, compat.ds(j * geometry.page, geometry.page)], full.at[slot])

    for i in range(stages):
        compat.when(i < share.tiles)(functools.partial(fetch, jnp.int32(i)))

    load_rows(arrays.q, q_tile, staging, geometry, keys.token_of, tokens, place.head)

    def step(i, carry):
        acc, top, total = carry
        slot = lax.rem(i, jnp.int32(stages))
        first_key = keys.first_key(i)
        compat.wait(k_full.at[slot])

        def values_there():
            tile = v_tiles.at[slot]
            compat.wait(v_full.at[slot])
            if geometry.float8:
                widen(tile, wide[1], geometry)
                compat.commit()  # all four warps have read both tiles of this slot
                compat.when(i + stages < share.tiles)(lambda: fetch(i + stages))
                tile = wide[1]
            compat.when(first_key + tile_kv > keys.seq_len)(lambda: clear_tail(tile, keys.seq_len - first_key))
            return tile

        if geometry.float8:
            widen(k_tiles.at[slot], wide[0], geometry)
            compat.commit()
            # The values are widened while the tensor core multiplies.
            scores = compat.matmul(q_tile, wide[0].T, before_wait=values_there)
            scores = by_scale(scores, arrays.scales, arrays.layer[0], KEY)
        else:
            scores = compat.matmul(q_tile, k_tiles.at[slot].T)
        scores = options.capped(scores) * options.factor
        mask = visible(scores.shape, geometry, first_key, keys.first_position, window, one_token=call.query_len == 1)
        scores = jnp.where(mask, scores, NEG_INF)
        new_top = jnp.maximum(top, scores.max(axis=1))
        shift = jnp.where(new_top > NEG_INF, new_top, 0.0)
        keep = jnp.exp2(top - shift)
        p = jnp.exp2(scores - spread(shift, scores.shape))
        total = total * keep + p.sum(axis=1)
        p = p.astype(geometry.dtype)
        if compat.interpreted():
            p_tile[0][...] = p
            compat.commit()
        values = wide[1] if geometry.float8 else values_there()
        product = compat.matmul(p_tile[0] if compat.interpreted() else p, values)
        acc = acc * spread(keep, acc.shape) + product
        compat.arrive(reusable)  # all four warps are done with this slot
        compat.wait(reusable)
        if not geometry.float8:
            compat.when(i + stages < share.tiles)(lambda: fetch(i + stages))
        return acc, new_top, total

    carry = (
        compat.filled((TILE_ROWS, geometry.head_dim), 0.0, compat.tile_layout()),
        compat.filled((TILE_ROWS,), NEG_INF, compat.row_layout()),
        compat.filled((TILE_ROWS,), 0.0, compat.row_layout()),
    )
    acc, top, total = lax.fori_loop(0, share.tiles, step, carry)

    def finished(sinks):
        return by_scale(finish(acc, top, total, sinks), arrays.scales, arrays.layer[0], VALUE)

    def store(result, put):
        store_rows(result, staging, geometry, put, tokens)

    deliver(call, arrays, keys, top, total, compat.row_layout(), finished, store)
