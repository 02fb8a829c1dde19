"""One CTA of decode attention with queries as the columns of the tensor core's tile, for few of them.

The 64 rows of the tile are keys, so that 8 or 16 queries cost what they are: 4 and 8 registers for scores and result
instead of 32 and 64, no exponentials of rows that nobody asked for. Four CTAs so fit an SM, begin at once in place of
two rounds of two, and keep each other's copies in flight; each has a ring of single tiles, keys and values in turn.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_combine_mosaic import combine_if_last
from jaxrunner.pallas.attention_mosaic import NEG_INF, Geometry, clear_tail, value_offset
from jaxrunner.pallas.attention_shares import Arrays, Call, Fresh, Keys, Place
from jaxrunner.pallas.rope_kv_write_mosaic import rotated_halves

MOST_QUERIES = 16
TILE_BYTES = 16 * 1024
FEW_CTAS = 132
"""Up to so many are given shares until three fill each SM, which leaves memory for one more tile in flight."""
WIDTH = 64
"""Elements of a row that are staged at once."""


def takes(geometry: Geometry, query_len: int) -> bool:
    """Whether a CTA has few enough queries, and tiles that four CTAs of an SM have room for."""
    queries = min(query_len, geometry.tokens) * geometry.heads
    tile = geometry.tile_kv * geometry.head_dim * 2
    return not geometry.float8 and queries <= MOST_QUERIES and tile <= TILE_BYTES and geometry.head_dim % 64 == 0


def takes_projection(geometry: Geometry) -> bool:
    """Whether the kernel also takes a token of each request as the projection left it: halves are staged whole."""
    return takes(geometry, 1) and geometry.head_dim == 2 * WIDTH and geometry.head_tiles == 1


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
        compat.row_major_smem((columns, WIDTH), jnp.float32),
        compat.barriers(call.stages, geometry.pages_of_tile),
    ]


def attend(call: Call, arrays: Arrays, scratch: tuple[Any, ...], place: Place) -> None:
    """The result of one share, into `arrays.out`, or into the partial results where the request has more shares."""
    geometry, options, slots = call.geometry, call.options, call.stages
    query_len, window, tile_kv = call.query_len, call.options.window, call.geometry.tile_kv
    head_dim, heads, columns = geometry.head_dim, geometry.heads, columns_of(call)
    request, head, share = place.request, place.head, place.share
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
        compat.when(is_last & at_once)(lambda: _write_new(fresh, arrays, call, keys, request))
        fetch_first()
        _load_rotated(fresh, q_tile, staging, call, request, head)
        compat.when(is_last & ~at_once)(lambda: _write_new(fresh, arrays, call, keys, request))
    else:
        fetch_first()
        _load_queries(arrays.q, q_tile, staging, call, keys, head)

    def across(vector, rows):
        return compat.spread(vector, (rows, columns), 1, layout)

    def step(i, carry):
        acc, top, total = carry
        first_key = keys.first_key(i)
        slot = slot_of(i, 0)
        compat.wait(full.at[slot])
        scores = compat.matmul(tiles.at[slot], q_tile.T)
        scores = options.capped(scores) * options.factor
        scores = jnp.where(_visible(call, first_key, keys.first_position, window), scores, NEG_INF)
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

    def store(result, put):
        _store_results(result, q_tile, staging, call, put)

    def to_result():
        sink = None
        if arrays.sinks is not None:
            sink = compat.load(arrays.sinks.at[head, compat.ds(0, columns)], layout=column_layout, optimized=False)

        def put(i, part, rows):
            @compat.when(keys.query + i < query_len)
            def _():
                arrays.out[request * query_len + keys.query + i, head, :, part] = rows.astype(geometry.q_dtype)

        store(acc * across(_factor(top, total, sink), head_dim), put)

    def to_partials():
        result_ref, sum_ref = arrays.partials

        def put(i, part, rows):
            here = compat.ds(i * heads, heads)
            result_ref[request, place.token_tile, head, place.split, here, part] = rows

        store(acc * across(_factor(top, total, None), head_dim), put)
        positive = jnp.where(total > 0, total, 1.0)
        sums = jnp.where(total > 0, top + jnp.log2(positive), NEG_INF)
        sum_ref[request, place.token_tile, head, place.split, compat.ds(0, columns)] = sums

    if call.splits == 1:
        to_result()
    else:
        compat.when(share.shares == 1)(to_result)

        @compat.when(share.shares > 1)
        def _():
            to_partials()
            combine_if_last(call, arrays, place)


def _visible(call: Call, first_key: jax.Array, first_position: jax.Array, window: int | None) -> jax.Array:
    """bool[tile_kv, columns]: may the column (the token first_position + column // heads) see the key of the row?

    column // heads >= x is column >= x * heads, which needs no division.
    """
    shape, heads = (call.geometry.tile_kv, columns_of(call)), call.geometry.heads
    if call.query_len == 1:  # all columns see the same keys
        row = compat.index_of(shape, 0)
        mask = row <= first_position - first_key
        return mask if window is None else mask & (row > first_position - window - first_key)
    difference = compat.index_of(shape, 1) - compat.index_of(shape, 0) * heads
    mask = difference >= (first_key - first_position) * heads
    return mask if window is None else mask & (difference < (first_key - first_position + window) * heads)


def _factor(top: jax.Array, total: jax.Array, sink: jax.Array | None) -> jax.Array:
    """What the columns of a result are multiplied with at the end of a running softmax in log2 units."""
    if sink is None:
        return 1.0 / jnp.where(total > 0, total, 1.0)
    highest = jnp.maximum(top, sink)
    keep = jnp.exp2(top - highest)
    return keep / (total * keep + jnp.exp2(sink - highest))


def _load_queries(source: Any, target: Any, staging: Any, call: Call, keys: Keys, head: jax.Array) -> None:
    """Queries, GMEM -> rows of a swizzled tile, through a row-major staging buffer; other rows keep garbage."""
    geometry, columns = call.geometry, columns_of(call)
    here = compat.ds(0, WIDTH)
    by_token = compat.rows_layout(geometry.heads, WIDTH, 4, in_smem=True)
    whole = compat.rows_layout(columns, WIDTH, 4, in_smem=True)
    for start in range(0, geometry.head_dim, WIDTH):
        part = compat.ds(start, WIDTH)
        refs = [source.at[keys.token_of(i), head, :, part] for i in range(call.tokens)]
        values = [compat.load(ref, layout=by_token, optimized=False) for ref in refs]
        for i, value in enumerate(values):
            staging[compat.ds(i * geometry.heads, geometry.heads), here] = value.astype(jnp.float32)
        compat.commit()
        target[:, part] = compat.load(staging.at[:, here], layout=whole, optimized=False).astype(geometry.dtype)
        compat.commit()


def _load_rotated(fresh: Fresh, target: Any, staging: Any, call: Call, token: jax.Array, head: jax.Array) -> None:
    """`_load_queries` of a projection: normed and rotated on the way."""
    geometry = call.geometry
    refs = _rope_of(fresh, token)
    heads_ref = fresh.qkv.at[token, compat.ds(head * geometry.heads, geometry.heads)]
    whole = compat.rows_layout(columns_of(call), WIDTH, 4, in_smem=True)
    layout = compat.rows_layout(geometry.heads, WIDTH, 4, in_smem=True)
    for part, value in rotated_halves(heads_ref, refs, fresh.q_norm, fresh.eps, layout=layout):
        staging[compat.ds(0, geometry.heads), compat.ds(0, WIDTH)] = value.astype(jnp.float32)
        compat.commit()
        rows = compat.load(staging.at[:, compat.ds(0, WIDTH)], layout=whole, optimized=False)
        target[:, part] = rows.astype(geometry.dtype)
        compat.commit()


def _rope_of(fresh: Fresh, token: jax.Array) -> tuple[Any, Any] | None:
    if fresh.rope is None:
        return None
    cos_ref, sin_ref = fresh.rope
    return cos_ref.at[token], sin_ref.at[token]


def _write_new(fresh: Fresh, arrays: Arrays, call: Call, keys: Keys, token: jax.Array) -> None:
    """The new token's key, normed and rotated, and its value into the cache, where copies will find them."""
    geometry, slot = call.geometry, fresh.slots[token]
    block, offset = lax.div(slot, jnp.int32(geometry.block_size)), lax.rem(slot, jnp.int32(geometry.block_size))
    page = (keys.base + block) * (geometry.block_size // geometry.page) + lax.div(offset, jnp.int32(geometry.page))
    row, here = lax.rem(offset, jnp.int32(geometry.page)), compat.ds(keys.head, 1)
    first = geometry.num_heads + keys.head
    key_ref, value_ref = (fresh.qkv.at[token, compat.ds(first + i * geometry.num_kv_heads, 1)] for i in range(2))
    layout = compat.rows_layout(1, WIDTH, geometry.dtype.itemsize)

    @compat.when(slot >= 0)
    def _():
        for part, key in rotated_halves(key_ref, _rope_of(fresh, token), fresh.k_norm, fresh.eps):
            value = compat.load(value_ref.at[:, part], layout=layout, optimized=False)
            arrays.kv[page, row, here, part] = key
            arrays.kv[page + value_offset(geometry), row, here, part] = value
        compat.commit_gmem()


def _store_results(result: jax.Array, tile: Any, staging: Any, call: Call, put: Any) -> None:
    """The way back: f32[head_dim, columns] in registers -> put(token of the tile, part of a row, values [heads, part]).

    The tensor core's tile turns in shared memory in 16 bits at a time only: the result rounded, then what that left.
    """
    geometry, columns = call.geometry, columns_of(call)
    here = compat.ds(0, WIDTH)
    by_token = compat.rows_layout(geometry.heads, WIDTH, 4, in_smem=True)
    whole = compat.rows_layout(columns, WIDTH, 4, in_smem=True)
    rounded = result.astype(geometry.dtype)
    left = (result - rounded.astype(jnp.float32)).astype(geometry.dtype)
    parts = [compat.ds(start, WIDTH) for start in range(0, geometry.head_dim, WIDTH)]

    def turned(value):
        tile.T[...] = value
        compat.commit()
        rows = [compat.load(tile.at[:, part], layout=whole, optimized=False).astype(jnp.float32) for part in parts]
        compat.commit()
        return rows

    for part, high, low in zip(parts, turned(rounded), turned(left), strict=True):
        staging[:, here] = high + low
        compat.commit()
        for i in range(call.tokens):
            rows = staging.at[compat.ds(i * geometry.heads, geometry.heads), here]
            put(i, part, compat.load(rows, layout=by_token, optimized=False))
        compat.commit()
