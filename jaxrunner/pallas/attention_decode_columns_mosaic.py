"""One CTA of decode attention with queries as the columns of the tensor core's tile, for few of them.

The 64 rows of the tile are keys, so that 8 or 16 queries cost what they are: 4 and 8 registers for scores and result
instead of 32 and 64, no exponentials of rows that nobody asked for. Four CTAs so fit an SM, begin at once in place of
two rounds of two, and keep each other's copies in flight; each has a ring of single tiles, keys and values in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_combine_mosaic import deliver
from jaxrunner.pallas.attention_mosaic import (
    NEG_INF,
    Geometry,
    clear_tail,
    fill_columns,
    load_rows,
    softmax_factor,
    store_columns,
    value_offset,
    visible,
)
from jaxrunner.pallas.attention_shares import Arrays, Call, Fresh, Keys, Place
from jaxrunner.pallas.rope_kv_write_mosaic import rotated_halves

MOST_QUERIES = 16
TILE_BYTES = 16 * 1024
FEW_CTAS = 132
"""Up to so many are given shares until three fill each SM, which leaves memory for one more tile in flight."""


def takes(geometry: Geometry, query_len: int) -> bool:
    """Whether a CTA has few enough queries, and tiles that four CTAs of an SM have room for."""
    queries = min(query_len, geometry.tokens) * geometry.heads
    tile = geometry.tile_kv * geometry.head_dim * 2
    return not geometry.float8 and queries <= MOST_QUERIES and tile <= TILE_BYTES and geometry.head_dim % 64 == 0


def takes_projection(geometry: Geometry) -> bool:
    """Whether the kernel also takes a token of each request as the projection left it: halves are staged whole."""
    return takes(geometry, 1) and geometry.head_dim == 2 * geometry.columns and geometry.head_tiles == 1


def stages(ctas: int) -> int:
    """Tiles in flight, of keys or of values. ctas: with one share a request."""
    return 3 if ctas > FEW_CTAS else 4


def ctas_of_sm(ctas: int) -> int:
    """That fit one."""
    return 4 if ctas > FEW_CTAS else 3


def columns_of(call: Call) -> int:
    """Columns of the tile: the queries of a CTA, up to a multiple of 8."""
    return -(-call.tokens * call.geometry.heads // 8) * 8


def scratch(call: Call) -> list[Any]:
    """Scratch of a CTA, in the order in which `attend` takes it. Stages are single tiles here."""
    geometry, columns = call.geometry, columns_of(call)
    return [
        compat.swizzled_smem((columns, geometry.head_dim), geometry.dtype),
        compat.swizzled_smem((call.stages, geometry.tile_kv, geometry.head_dim), geometry.dtype),
        compat.swizzled_smem((columns, geometry.tile_kv), geometry.dtype),
        compat.row_major_smem((columns, geometry.columns), jnp.float32),
        compat.barriers(call.stages, geometry.pages_of_tile),
    ]


def attend(call: Call, arrays: Arrays, scratch: tuple[Any, ...], place: Place) -> None:
    """The result of one share, into `arrays.out`, or into the partial results where the request has more shares."""
    geometry, options, slots = call.geometry, call.options, call.stages
    tile_kv, head_dim, columns, share = geometry.tile_kv, geometry.head_dim, columns_of(call), place.share
    q_tile, tiles, p_tile, staging, full = scratch
    keys = Keys(call, arrays, place)
    layout = compat.tile_layout()
    column_layout = layout.reduce(0)

    def slot_of(i, which):
        return lax.rem(2 * i + which, jnp.int32(slots))

    def fetch(i, which):
        slot = slot_of(i, which)
        for j, page in enumerate(keys.pages(i, values=bool(which))):
            compat.copy_in(page, tiles.at[slot, compat.ds(j * geometry.page, geometry.page)], full.at[slot])

    def fetch_number(i, ahead):
        """The ring's tile that is `ahead` of the keys of tile i, if there is one."""
        ahead, which = divmod(ahead, 2)
        compat.when(i + ahead < share.tiles)(lambda: fetch(i + ahead, which))

    def fetch_first():
        for number in range(slots):
            fetch_number(jnp.int32(0), number)

    if isinstance(arrays.q, Fresh):
        fresh = arrays.q
        # The last tile of the request is copied after the new token is in the cache, all others need not wait for it.
        is_last = (share.tiles > 0) & (keys.first_key(share.tiles) >= keys.seq_len)
        at_once = share.tiles <= (slots + 1) // 2
        compat.when(is_last & at_once)(lambda: _write_new(fresh, arrays, keys))
        fetch_first()
        _load_rotated(fresh, q_tile, staging, geometry, place)
        compat.when(is_last & ~at_once)(lambda: _write_new(fresh, arrays, keys))
    else:
        fetch_first()
        rows = compat.rows_layout(columns, geometry.columns, 4, in_smem=True)
        load_rows(arrays.q, q_tile, staging, geometry, keys.token_of, call.tokens, place.head, layout=rows)

    def across(vector, rows):
        return compat.spread(vector, (rows, columns), 1, layout)

    def step(i, carry):
        acc, top, total = carry
        first_key = keys.first_key(i)
        slot = slot_of(i, 0)
        compat.wait(full.at[slot])
        scores = compat.matmul(tiles.at[slot], q_tile.T)
        scores = options.capped(scores) * options.factor
        of = (scores.shape, geometry, first_key, keys.first_position, options.window)
        scores = jnp.where(visible(*of, axis=1, one_token=call.query_len == 1), scores, NEG_INF)
        new_top = jnp.maximum(top, scores.max(axis=0))
        shift = jnp.where(new_top > NEG_INF, new_top, 0.0)
        keep = jnp.exp2(top - shift)
        p = jnp.exp2(scores - across(shift, tile_kv))
        total = total * across(keep, tile_kv) + p
        # Each warp has read the last probabilities before it gave its part of this maximum.
        p_tile.T[...] = p.astype(geometry.dtype)
        compat.commit()  # all four warps are done with these keys, and with the values before them
        compat.when(i > 0)(lambda: fetch_number(i, slots - 1))
        fetch_number(i, slots)
        slot = slot_of(i, 1)
        tile = tiles.at[slot]
        compat.wait(full.at[slot])
        compat.when(first_key + tile_kv > keys.seq_len)(lambda: clear_tail(tile, keys.seq_len - first_key))
        product = compat.matmul(tile.T, p_tile.T)
        return acc * across(keep, head_dim) + product, new_top, total

    carry = (
        compat.filled((head_dim, columns), 0.0, layout),
        compat.filled((columns,), NEG_INF, column_layout),
        compat.filled((tile_kv, columns), 0.0, layout),
    )
    acc, top, total = lax.fori_loop(0, share.tiles, step, carry)
    total = total.sum(axis=0)

    def finished(sinks):
        return acc * across(softmax_factor(top, total, sinks), head_dim)

    def store(result, put):
        store_columns(_turned(result, q_tile, geometry), staging, geometry, put, call.tokens)

    deliver(call, arrays, keys, top, total, column_layout, finished, store)


def _load_rotated(fresh: Fresh, target: Any, staging: Any, geometry: Geometry, place: Place) -> None:
    """`load_rows` of a projection: normed and rotated on the way."""
    heads, width, token = geometry.heads, geometry.columns, place.request
    heads_ref = fresh.qkv.at[token, compat.ds(place.head * heads, heads)]
    of_token, whole = (compat.rows_layout(rows, width, 4, in_smem=True) for rows in (heads, target.shape[0]))
    halves = rotated_halves(heads_ref, _rope_of(fresh, token), fresh.q_norm, fresh.eps, layout=of_token)
    for part, value in halves:
        staging[compat.ds(0, heads), compat.ds(0, width)] = value.astype(jnp.float32)
        fill_columns(target, part, staging, geometry, whole)


def _rope_of(fresh: Fresh, token: jax.Array) -> tuple[Any, Any] | None:
    if fresh.rope is None:
        return None
    cos_ref, sin_ref = fresh.rope
    return cos_ref.at[token], sin_ref.at[token]


def _write_new(fresh: Fresh, arrays: Arrays, keys: Keys) -> None:
    """The new token's key, normed and rotated, and its value into the cache, where copies will find them."""
    geometry, token = keys.call.geometry, keys.place.request
    slot, here = fresh.slots[token], compat.ds(keys.head, 1)
    page = keys.base * (geometry.block_size // geometry.page) + lax.div(slot, jnp.int32(geometry.page))
    row = lax.rem(slot, jnp.int32(geometry.page))
    first = geometry.num_heads + keys.head
    key_ref, value_ref = (fresh.qkv.at[token, compat.ds(first + i * geometry.num_kv_heads, 1)] for i in range(2))
    layout = compat.rows_layout(1, geometry.columns, geometry.dtype.itemsize)

    @compat.when(slot >= 0)
    def _():
        for part, key in rotated_halves(key_ref, _rope_of(fresh, token), fresh.k_norm, fresh.eps):
            value = compat.load(value_ref.at[:, part], layout=layout, optimized=False)
            arrays.kv[page, row, here, part] = key
            arrays.kv[page + value_offset(geometry), row, here, part] = value
        compat.commit_gmem()


def _turned(result: jax.Array, tile: Any, geometry: Geometry) -> Iterator[jax.Array]:
    """f32[head_dim, queries] in the tensor core's registers -> columns of its transpose, some at a time.

    The tensor core's tile turns in shared memory in 16 bits at a time only: the result rounded, then what that left.
    """
    width, (queries, head_dim) = geometry.columns, tile.shape
    layout = compat.rows_layout(queries, width, 4, in_smem=True)
    parts = [compat.ds(start, width) for start in range(0, head_dim, width)]
    rounded = result.astype(geometry.dtype)
    left = (result - rounded.astype(jnp.float32)).astype(geometry.dtype)

    def turned(value):
        tile.T[...] = value
        compat.commit()
        rows = [compat.load(tile.at[:, part], layout=layout, optimized=False).astype(jnp.float32) for part in parts]
        compat.commit()
        return rows

    return (high + low for high, low in zip(turned(rounded), turned(left), strict=True))
