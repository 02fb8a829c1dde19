"""Decode attention as Mosaic GPU kernels: every request has the same few queries, its keys are split over CTAs.

A CTA is one warpgroup with a row tile, a KV head, and a share of a request's key tiles; two CTAs fit an SM and keep
each other's copies in flight. How many shares a request really has is decided on the device from its length: short
ones are finished by one CTA, which writes the result; else each share leaves its result and the logarithm of its
softmax sum, and a second kernel combines them (and returns at once where there is nothing to combine).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_mosaic import (
    NEG_INF,
    TILE_ROWS,
    Geometry,
    Options,
    by_scale,
    clear_tail,
    default_tile_kv,
    finish,
    load_rows,
    page_index,
    refuse,
    shape_of,
    sink_rows,
    spread,
    store_rows,
    value_offset,
    visible,
    widen,
)
from jaxrunner.pallas.tuned_sizes import sizes_for
from jaxrunner.sampling.best_ids import best_ids
from jaxrunner.state.kv_cache import KEY, VALUE

STAGES = 2
CTAS_OF_GPU = 264
"""Two on each of 132 SMs."""
MAX_SPLITS = 32
MIN_TILES_OF_SPLIT = 2
COMBINING = 1.05
"""What writing and combining partial results costs, as a factor."""


def default_splits(batch: int, row_tiles: int) -> int:
    """Shares of a request's keys: enough CTAs to fill the GPU, and several rounds of them when it is full."""
    ctas = batch * row_tiles
    if ctas >= 8 * CTAS_OF_GPU:
        return 1
    wanted = CTAS_OF_GPU if ctas < CTAS_OF_GPU // 2 else 4 * CTAS_OF_GPU
    return max(1, min(MAX_SPLITS, wanted // ctas))


def tiles_of_share(tiles: jax.Array, ctas: int, splits: int, min_tiles: int) -> jax.Array:
    """i32[1], most tiles of one share. tiles: i32[B], key tiles of each request. ctas: row tiles of a request.

    CTAs run in rounds of CTAS_OF_GPU and take as long as their tiles, so the best number of shares is seldom the
    largest: of 1..splits shares of the longest request, the one whose rounds end first. Where a request has one share
    at most, any number will do.
    """
    if splits == 1:
        return jnp.ones(1, jnp.int32)
    shares = jnp.arange(1, splits + 1, dtype=jnp.int32)
    each = jnp.maximum(-(-tiles.max() // shares), min_tiles)
    number = jnp.maximum(ctas * (-(-tiles // each[:, None])).sum(axis=1), 1)
    mean = ctas * tiles.sum() / number
    rounds = -(-number // CTAS_OF_GPU)
    cost = jnp.maximum(each, rounds * mean) * jnp.where(shares > 1, COMBINING, 1.0)
    return each[jnp.argmin(cost)].reshape(1)


def longest_first(tiles: jax.Array) -> jax.Array:
    """i32[B], the requests in the order of their key tiles, i32[B], most first: what is begun last should be short."""
    return best_ids(tiles[None].astype(jnp.float32), len(tiles))[0]


class _Share(NamedTuple):
    """One CTA's part of a request: `tiles` key tiles from `first` on, one of `shares` shares."""

    shares: jax.Array
    first: jax.Array
    tiles: jax.Array


def decode_attention(
    q: jax.Array,
    blocks: jax.Array,
    layer: jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    num_splits: int | None = None,
    tile_kv: int | None = None,
    stages: int | None = None,
    min_tiles: int = MIN_TILES_OF_SPLIT,
) -> jax.Array:
    """See `attention` for the arguments and the result; metadata.query_len must be set.

    num_splits: most shares of a request's keys. tile_kv: keys of a tile, a multiple of 64. stages: tiles in flight.
    min_tiles: fewest tiles of a share. All by default as they were measured, or chosen from the shapes.
    Raises ImplementationError where the kernels cannot run or take this case.
    """
    refuse(q, blocks, scale, soft_cap)
    options = Options(scale, window, soft_cap)
    num_heads, head_dim = q.shape[1:]
    num_blocks, block_size, num_kv_heads = blocks.shape[2:5]
    shape = shape_of(q, blocks, metadata.query_len)
    tuned = sizes_for("attention_decode", batch=metadata.block_table.shape[0], **shape)
    tile_kv = tile_kv or tuned.get("tile_kv") or default_tile_kv(head_dim, prefill=False)
    stages = stages or tuned.get("stages", STAGES)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, block_size, num_blocks, tile_kv, blocks.dtype, q.dtype)
    batch, query_len = metadata.block_table.shape[0], metadata.query_len
    assert query_len is not None, "a ragged batch is for ragged_attention"
    tokens = min(query_len, geometry.tokens)
    token_tiles = -(-query_len // tokens)
    head_tiles = num_kv_heads * geometry.head_tiles
    splits = num_splits or tuned.get("num_splits") or default_splits(batch, head_tiles * token_tiles)

    partial_shape = (batch, token_tiles, head_tiles, splits, tokens * geometry.heads, head_dim)
    out_type = [jax.ShapeDtypeStruct((batch * query_len, head_tiles, geometry.heads, head_dim), q.dtype)]
    if splits > 1:
        out_type += [
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct((*partial_shape[:4], TILE_ROWS), jnp.float32),
        ]

    def tile_range(seq_len):
        last = lax.div(seq_len + (tile_kv - 1), jnp.int32(tile_kv))
        if window is None:
            return jnp.zeros_like(last), last
        return lax.div(jnp.maximum(seq_len - query_len - window + 1, 0), jnp.int32(tile_kv)), last

    first, last = tile_range(metadata.seq_lens)
    largest = tiles_of_share(last - first, head_tiles * token_tiles, splits, min_tiles)

    # In one round all CTAs begin at once.
    order = longest_first(last - first) if batch * head_tiles * token_tiles > CTAS_OF_GPU else None

    def share_of(seq_len, largest, split) -> _Share:
        first, last = tile_range(seq_len)
        tiles = last - first
        shares = jnp.clip(lax.div(tiles + (largest - 1), largest), 1, splits)
        each = lax.div(tiles + (shares - 1), shares)
        start = split * each
        return _Share(shares, first + start, jnp.maximum(jnp.minimum(tiles - start, each), 0))

    def attention_decode(q_ref, kv_ref, layer_ref, table, seq_lens, largest_ref, sinks_ref, *refs):
        scales_ref = order_ref = None
        if kv_scales is not None:
            scales_ref, refs = refs[0], refs[1:]
        if order is not None:
            order_ref, refs = refs[0], refs[1:]
        out_ref, *partial_refs = refs[: len(out_type)]
        scratch = refs[len(out_type) :]
        index = lax.axis_index("cta")
        head, index = lax.rem(index, jnp.int32(head_tiles)), lax.div(index, jnp.int32(head_tiles))
        token_tile, index = lax.rem(index, jnp.int32(token_tiles)), lax.div(index, jnp.int32(token_tiles))
        split, b = lax.rem(index, jnp.int32(splits)), lax.div(index, jnp.int32(splits))
        b = b if order_ref is None else order_ref[b]
        share = share_of(seq_lens[b], largest_ref[0], split)

        @compat.when(split < share.shares)
        def _():
            work(q_ref, kv_ref, layer_ref, table, seq_lens, sinks_ref, scales_ref, out_ref, partial_refs, scratch)(
                b, token_tile, head, split, share
            )

    def work(q_ref, kv_ref, layer_ref, table, seq_lens, sinks_ref, scales_ref, out_ref, partial_refs, scratch):
        q_tile, k_tiles, v_tiles, staging, k_full, v_full, reusable, *more = scratch
        wide, p_tile = (more[:2], more[2:]) if geometry.float8 else ([], more)

        def run(b, token_tile, head, split, share):
            seq_len = seq_lens[b]
            kv_head = lax.div(head, jnp.int32(geometry.head_tiles))
            base = (layer_ref[0] * 2 + KEY) * num_blocks
            query = token_tile * tokens
            first_position = seq_len - query_len + query
            last_page = jnp.maximum(lax.div(seq_len - 1, jnp.int32(geometry.page)), 0)
            first_page = jnp.int32(0)
            if window is not None:
                oldest = jnp.maximum(seq_len - query_len - window + 1, 0)
                first_page = lax.div(oldest, jnp.int32(geometry.page))

            def fetch(i):
                slot = lax.rem(i, jnp.int32(stages))
                page = (share.first + i) * geometry.pages_of_tile
                indices = [
                    page_index(geometry, base, table, b, jnp.clip(page + j, first_page, last_page))
                    for j in range(geometry.pages_of_tile)
                ]
                for tiles, full, offset in ((k_tiles, k_full, 0), (v_tiles, v_full, value_offset(geometry))):
                    for j, page_id in enumerate(indices):
                        target = tiles.at[slot, compat.ds(j * geometry.page, geometry.page)]
                        compat.copy_in(kv_ref.at[page_id + offset, :, kv_head], target, full.at[slot])

            for i in range(stages):
                compat.when(i < share.tiles)(functools.partial(fetch, jnp.int32(i)))

            def token_of(i):
                return b * query_len + jnp.minimum(query + i, query_len - 1)

            load_rows(q_ref, q_tile, staging, geometry, token_of, tokens, head)

            def step(i, carry):
                acc, top, total = carry
                slot = lax.rem(i, jnp.int32(stages))
                first_key = (share.first + i) * tile_kv
                compat.wait(k_full.at[slot])

                def values_there():
                    tile = v_tiles.at[slot]
                    compat.wait(v_full.at[slot])
                    if geometry.float8:
                        widen(tile, wide[1], geometry)
                        compat.commit()  # all four warps have read both tiles of this slot
                        compat.when(i + stages < share.tiles)(lambda: fetch(i + stages))
                        tile = wide[1]
                    compat.when(first_key + tile_kv > seq_len)(lambda: clear_tail(tile, seq_len - first_key))
                    return tile

                if geometry.float8:
                    widen(k_tiles.at[slot], wide[0], geometry)
                    compat.commit()
                    # The values are widened while the tensor core multiplies.
                    scores = compat.matmul(q_tile, wide[0].T, before_wait=values_there)
                    scores = by_scale(scores, scales_ref, layer_ref[0], KEY)
                else:
                    scores = compat.matmul(q_tile, k_tiles.at[slot].T)
                scores = options.capped(scores) * options.factor
                if query_len == 1:  # all rows see the same keys
                    column = compat.index_of(scores.shape, 1)
                    mask = column <= first_position - first_key
                    if window is not None:
                        mask &= column > first_position - window - first_key
                else:
                    mask = visible(scores.shape, geometry, first_key, first_position, window)
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
                compat.filled((TILE_ROWS, head_dim), 0.0, compat.tile_layout()),
                compat.filled((TILE_ROWS,), NEG_INF, compat.row_layout()),
                compat.filled((TILE_ROWS,), 0.0, compat.row_layout()),
            )
            acc, top, total = lax.fori_loop(0, share.tiles, step, carry)

            def to_result():
                sink = None
                if sinks is not None:
                    sink = compat.load(sinks_ref.at[head], layout=compat.row_layout(), optimized=False)

                def put(i, columns, rows):
                    @compat.when(query + i < query_len)
                    def _():
                        out_ref[b * query_len + query + i, head, :, columns] = rows.astype(geometry.q_dtype)

                result = by_scale(finish(acc, top, total, sink), scales_ref, layer_ref[0], VALUE)
                store_rows(result, staging, geometry, put, tokens)

            def to_partials():
                result_ref, sum_ref = partial_refs

                def put(i, columns, rows):
                    here = compat.ds(i * geometry.heads, geometry.heads)
                    result_ref[b, token_tile, head, split, here, columns] = rows

                result = by_scale(finish(acc, top, total, None), scales_ref, layer_ref[0], VALUE)
                store_rows(result, staging, geometry, put, tokens)
                positive = jnp.where(total > 0, total, 1.0)
                sum_ref[b, token_tile, head, split] = jnp.where(total > 0, top + jnp.log2(positive), NEG_INF)

            if splits == 1:
                to_result()
            else:
                compat.when(share.shares == 1)(to_result)
                compat.when(share.shares > 1)(to_partials)

        return run

    scratch = [
        compat.swizzled_smem((TILE_ROWS, head_dim), geometry.dtype),
        compat.swizzled_smem((stages, tile_kv, head_dim), geometry.cache_dtype),
        compat.swizzled_smem((stages, tile_kv, head_dim), geometry.cache_dtype),
        compat.row_major_smem((TILE_ROWS, geometry.columns), jnp.float32),
        compat.barriers(stages, geometry.pages_of_tile),
        compat.barriers(stages, geometry.pages_of_tile),
        compat.barriers(),
    ]
    if geometry.float8:
        scratch += [compat.swizzled_smem((tile_kv, head_dim), geometry.dtype)] * 2
    if compat.interpreted():
        scratch.append(compat.swizzled_smem((TILE_ROWS, tile_kv), geometry.dtype))
    by_row = sink_rows(sinks, geometry)
    out, *partials = compat.kernel(
        attention_decode,
        out_type=out_type,
        scratch_types=scratch,
        grid=(batch * splits * token_tiles * head_tiles,),
        grid_names=("cta",),
        approx_math=True,
        auto_barriers=False,
    )(
        geometry.queries(q),
        geometry.pages(blocks),
        jnp.reshape(layer, (1,)),
        metadata.block_table,
        metadata.seq_lens,
        largest,
        by_row,
        *([] if kv_scales is None else [kv_scales]),
        *([] if order is None else [order]),
    )
    if splits > 1:
        lengths = (metadata.seq_lens, largest)
        out = _combine(out, partials[0], partials[1], lengths, None if sinks is None else by_row, share_of, query_len)
    return out.reshape(q.shape)


def _combine(
    out: jax.Array,
    results: jax.Array,
    sums: jax.Array,
    lengths: tuple[jax.Array, jax.Array],
    sinks: jax.Array | None,
    share_of: Callable[[Any, Any, Any], _Share],
    query_len: int,
) -> jax.Array:
    """The result with the rows of split requests written into it; one CTA for some rows of a row tile."""
    batch, _, head_tiles, splits, rows, head_dim = results.shape
    heads = out.shape[2]
    layout = compat.rows_layout(heads, head_dim, 4)
    tokens = rows // heads

    def attention_combine(result_ref, sum_ref, lens_ref, largest_ref, *refs):
        sinks_ref, out_ref = (refs[0], refs[1]) if sinks is not None else (None, refs[0])
        index = lax.axis_index("cta")
        head, index = lax.rem(index, jnp.int32(head_tiles)), lax.div(index, jnp.int32(head_tiles))
        query, b = lax.rem(index, jnp.int32(query_len)), lax.div(index, jnp.int32(query_len))
        token_tile, token = lax.div(query, jnp.int32(tokens)), lax.rem(query, jnp.int32(tokens))
        shares = share_of(lens_ref[b], largest_ref[0], jnp.int32(0)).shares

        @compat.when(shares > 1)
        def _():
            here = compat.ds(token * heads, heads)

            def column(ref):
                return compat.load(ref, layout=layout.reduce(1), optimized=False)

            logs = []
            for s in range(splits):
                log = column(sum_ref.at[b, token_tile, head, jnp.minimum(s, shares - 1), here])
                # Shares that do not exist repeat the last one; their weight is zero.
                logs.append(log + jnp.where(s < shares, 0.0, NEG_INF))
            top = functools.reduce(jnp.maximum, logs)
            if sinks_ref is not None:
                sink = column(sinks_ref.at[head, compat.ds(0, heads)])
                top = jnp.maximum(top, sink)
            top = jnp.where(top > NEG_INF, top, 0.0)
            weights = [jnp.exp2(log - top) for log in logs]
            total = functools.reduce(jnp.add, weights)
            if sinks_ref is not None:
                total += jnp.exp2(sink - top)
            parts = []
            for s, weight in enumerate(weights):
                source = result_ref.at[b, token_tile, head, jnp.minimum(s, shares - 1), here]
                part = compat.load(source, layout=layout, optimized=False)
                parts.append(part * compat.spread(weight, part.shape, 0, layout))
            acc = functools.reduce(jnp.add, parts)
            inverse = 1.0 / jnp.where(total > 0, total, 1.0)
            out_ref[b * query_len + query, head] = (acc * compat.spread(inverse, acc.shape, 0, layout)).astype(
                out.dtype
            )

    operands = [results, sums, *lengths] + ([] if sinks is None else [sinks])
    target = compat.in_place(out)
    compat.kernel(
        attention_combine,
        out_type=[],
        grid=(batch * query_len * head_tiles,),
        grid_names=("cta",),
        approx_math=True,
        auto_barriers=False,
    )(*operands, target)
    return target[...]
