"""Attention of a ragged batch (chunks of prompts, decodes among them) as one Mosaic GPU kernel.

A CTA is two warpgroups that compute and one that copies. Each computing warpgroup has a row tile of its own: tokens of
one request times the heads of one KV head's group; the copying one streams the key tiles that the two see. They take
turns on the tensor core: while one multiplies, the other does its softmax. The work list, built on the device, names
the request and the first token of each CTA; CTAs of the longest rows start first.
"""

from __future__ import annotations

import functools

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
from jaxrunner.state.kv_cache import KEY, VALUE

STAGES = 2
REGISTERS = {False: (232, 40), True: (224, 56)}
"""Of a thread that computes and of one that copies, without and with tiles to widen."""
COMPUTE = 2
"""Computing warpgroups of a CTA."""


def work_list(query_start_loc: jax.Array, num_tokens: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """(request, first token in it) of each tile of `tokens` tokens, i32[num_tokens // tokens + B + 1].

    The request after the last stands for the padding behind the live tokens. Request r has its tiles from
    query_start_loc[r] // tokens + r on: always enough of them, some empty, and no sum over the requests before.
    """
    batch = query_start_loc.shape[0] - 1
    first = lax.div(query_start_loc, jnp.int32(tokens)) + jnp.arange(batch + 1, dtype=jnp.int32)
    tile = jnp.arange(num_tokens // tokens + batch + 1, dtype=jnp.int32)
    request = (first[None, 1:] <= tile[:, None]).sum(axis=1, dtype=jnp.int32)
    return request, (tile - first[request]) * tokens


def default_stages(geometry: Geometry) -> int:
    """Two tiles in flight, where shared memory has room for them beside the float8 tiles that they are widened from."""
    return 1 if geometry.float8 and geometry.head_dim > 192 else STAGES


def ragged_attention(
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
    tile_kv: int | None = None,
    stages: int | None = None,
    ping_pong: bool | None = None,
) -> jax.Array:
    """See `attention` for the arguments and the result.

    tile_kv: keys of a tile, a multiple of 64. stages: tiles in flight. ping_pong: the computing warpgroups take turns.
    All by default as they were measured, or chosen from the shapes.
    Raises ImplementationError where the kernel cannot run or take this case.
    """
    refuse(q, blocks, scale, soft_cap)
    options = Options(scale, window, soft_cap)
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads = blocks.shape[2:5]
    tuned = sizes_for("attention_prefill", tokens=num_tokens, **shape_of(q, blocks))
    tile_kv = tile_kv or tuned.get("tile_kv") or default_tile_kv(head_dim, prefill=True)
    ping_pong = tuned.get("ping_pong", True) if ping_pong is None else ping_pong
    geometry = Geometry(num_heads, num_kv_heads, head_dim, block_size, num_blocks, tile_kv, blocks.dtype, q.dtype)
    stages = stages or tuned.get("stages") or default_stages(geometry)
    batch = metadata.block_table.shape[0]
    tokens, head_tiles = geometry.tokens, num_kv_heads * geometry.head_tiles
    tile_request, tile_offset = work_list(metadata.query_start_loc, num_tokens, COMPUTE * tokens)
    num_tiles = tile_request.shape[0]
    layout = compat.tile_layout()
    factor = options.factor

    def attention_prefill(q_ref, kv_ref, layer_ref, table, seq_lens, starts, requests, offsets, sinks_ref, *refs):
        scales_ref = None
        if kv_scales is not None:
            scales_ref, refs = refs[0], refs[1:]
        out_ref, q_tiles, k_tiles, v_tiles, staging, k_full, v_full, k_free, v_free, turn, *more = refs
        raw, p_tiles = (more[:4], more[4:]) if geometry.float8 else ([], more)
        group = lax.axis_index("warpgroup")
        cta = lax.axis_index("cta")
        head, tile = lax.rem(cta, jnp.int32(head_tiles)), num_tiles - 1 - lax.div(cta, jnp.int32(head_tiles))
        request, offset = requests[tile], offsets[tile]
        padding = request >= batch
        row = jnp.minimum(request, batch - 1)
        start = starts[request]
        query_len = jnp.where(padding, num_tokens, starts[row + 1]) - start
        seq_len = jnp.where(padding, 0, seq_lens[row])
        context = seq_len - query_len
        stop = jnp.minimum(context + offset + COMPUTE * tokens, seq_len)
        first = jnp.int32(0)
        if window is not None:
            first = lax.div(jnp.maximum(context + offset - window + 1, 0), jnp.int32(tile_kv))
        last = lax.div(jnp.maximum(stop, 0) + (tile_kv - 1), jnp.int32(tile_kv))
        live = offset < query_len
        count = jnp.where(live, jnp.maximum(last - first, 0), 0)

        def take_turn():
            if ping_pong:
                compat.arrive(turn)
                compat.wait(turn)

        def compute():
            query = offset + group * tokens
            position = context + query
            q_tile, stage = q_tiles.at[group], staging.at[group]

            def token_of(i):
                return jnp.clip(start + query + i, 0, num_tokens - 1)

            load_rows(q_ref, q_tile, stage, geometry, token_of, tokens, head)
            compat.when(group == 1)(take_turn)

            def step(i, carry, masked):
                acc, top, total = carry
                slot = lax.rem(i - first, jnp.int32(stages))
                compat.wait(k_full.at[slot])
                scores = compat.matmul(q_tile, k_tiles.at[slot].T, before_wait=take_turn)
                compat.arrive(k_free.at[slot])
                scores = options.capped(by_scale(scores, scales_ref, layer_ref[0], KEY))
                if masked:
                    mask = visible(scores.shape, geometry, i * tile_kv, position, window)
                    scores = jnp.where(mask, scores, NEG_INF)
                new_top = jnp.maximum(top, scores.max(axis=1) * factor)
                shift = jnp.where(new_top > NEG_INF, new_top, 0.0) if masked else new_top
                keep = jnp.exp2(top - shift)
                p = jnp.exp2(scores * factor - spread(shift, scores.shape))
                acc = acc * spread(keep, acc.shape)
                total = total * keep + p.sum(axis=1)
                p = p.astype(geometry.dtype)
                if compat.interpreted():
                    p_tiles[0][group] = p
                    compat.commit()
                if ping_pong:
                    compat.arrive(turn)
                compat.wait(v_full.at[slot])
                if masked:
                    tail = seq_len - i * tile_kv
                    compat.when(tail < tile_kv)(lambda: clear_tail(v_tiles.at[slot], tail))
                if ping_pong:
                    compat.wait(turn)
                if compat.interpreted():
                    acc = acc + compat.matmul(p_tiles[0].at[group], v_tiles.at[slot])
                else:
                    acc = compat.matmul_add(acc, p, v_tiles.at[slot])
                compat.arrive(v_free.at[slot])
                return acc, new_top, total

            end = first + count
            clean = first  # the first tile that is as a whole inside the window of all rows
            if window is not None:
                clean = jnp.clip(
                    lax.div(jnp.maximum(position + tokens - window, 0) + (tile_kv - 1), jnp.int32(tile_kv)), first, end
                )
            causal = jnp.clip(lax.div(jnp.maximum(position + 1, 0), jnp.int32(tile_kv)), clean, end)
            carry = (
                compat.filled((TILE_ROWS, head_dim), 0.0, layout),
                compat.filled((TILE_ROWS,), NEG_INF, compat.row_layout()),
                compat.filled((TILE_ROWS,), 0.0, compat.row_layout()),
            )
            if window is not None:
                carry = lax.fori_loop(first, clean, functools.partial(step, masked=True), carry)
            carry = lax.fori_loop(clean, causal, functools.partial(step, masked=False), carry)
            acc, top, total = lax.fori_loop(causal, end, functools.partial(step, masked=True), carry)
            compat.when(group == 0)(take_turn)
            sink = None
            if sinks is not None:
                sink = compat.load(sinks_ref.at[head], layout=compat.row_layout(), optimized=False)

            def put(i, columns, rows):
                @compat.when(query + i < query_len)
                def _():
                    out_ref[start + query + i, head, :, columns] = rows.astype(geometry.q_dtype)

            result = by_scale(finish(acc, top, total, sink), scales_ref, layer_ref[0], VALUE)
            store_rows(result, stage, geometry, put, tokens)

        def copy():
            kv_head = lax.div(head, jnp.int32(geometry.head_tiles))
            base = (layer_ref[0] * 2 + KEY) * num_blocks
            last_page = jnp.maximum(lax.div(seq_len - 1, jnp.int32(geometry.page)), 0)
            first_page = jnp.int32(0)
            if window is not None:
                first_page = lax.div(jnp.maximum(context + offset - window + 1, 0), jnp.int32(geometry.page))

            def pages_of(i):
                page = (first + i) * geometry.pages_of_tile
                return [
                    page_index(geometry, base, table, row, jnp.clip(page + j, first_page, last_page))
                    for j in range(geometry.pages_of_tile)
                ]

            def fetch(indices, shift, tile, full):
                for j, index in enumerate(indices):
                    target = tile.at[compat.ds(j * geometry.page, geometry.page)]
                    compat.copy_in(kv_ref.at[index + shift, :, kv_head], target, full)

            def stream():
                @compat.loop(0, count)
                def _(i):
                    slot = lax.rem(i, jnp.int32(stages))
                    indices = pages_of(i)
                    for tiles, full, free, shift in (
                        (k_tiles, k_full, k_free, 0),
                        (v_tiles, v_full, v_free, value_offset(geometry)),
                    ):
                        compat.when(i >= stages)(functools.partial(compat.wait, free.at[slot]))
                        fetch(indices, shift, tiles.at[slot], full.at[slot])

            def stream_and_widen():
                k_raw, v_raw, k_raw_full, v_raw_full = raw
                sources = (
                    (k_raw, k_raw_full, k_tiles, k_full, k_free, 0),
                    (v_raw, v_raw_full, v_tiles, v_full, v_free, value_offset(geometry)),
                )

                @compat.when(count > 0)
                def _():
                    for tile, there, *_, shift in sources:
                        fetch(pages_of(0), shift, tile, there)

                @compat.loop(0, count)
                def _(i):
                    slot = lax.rem(i, jnp.int32(stages))
                    for tile, there, tiles, full, free, shift in sources:
                        compat.wait(there)
                        compat.when(i >= stages)(functools.partial(compat.wait, free.at[slot]))
                        widen(tile, tiles.at[slot], geometry)
                        compat.commit()
                        compat.arrive(full.at[slot])

                        @compat.when(i + 1 < count)
                        def _(tile=tile, there=there, shift=shift):
                            fetch(pages_of(i + 1), shift, tile, there)

            (stream_and_widen if geometry.float8 else stream)()

            if compat.interpreted():  # it wants every completion awaited
                for slot in range(stages):

                    @compat.when(slot < count)
                    def _(slot=slot):
                        compat.wait(k_free.at[slot])
                        compat.wait(v_free.at[slot])

        @compat.when(group < COMPUTE)
        def _():
            compat.set_registers(REGISTERS[geometry.float8][0], "increase")
            compat.when(live)(compute)

        @compat.when(group == COMPUTE)
        def _():
            compat.set_registers(REGISTERS[geometry.float8][1], "decrease")
            compat.when(live)(copy)

    scratch = [
        compat.swizzled_smem((COMPUTE, TILE_ROWS, head_dim), geometry.dtype),
        compat.swizzled_smem((stages, tile_kv, head_dim), geometry.dtype),
        compat.swizzled_smem((stages, tile_kv, head_dim), geometry.dtype),
        compat.row_major_smem((COMPUTE, TILE_ROWS, geometry.columns), geometry.q_dtype),
        compat.barriers(stages, 1 if geometry.float8 else geometry.pages_of_tile),
        compat.barriers(stages, 1 if geometry.float8 else geometry.pages_of_tile),
        compat.barriers(stages, COMPUTE),
        compat.barriers(stages, COMPUTE),
        compat.barriers(1, COMPUTE),
    ]
    if geometry.float8:
        scratch += [compat.swizzled_smem((tile_kv, head_dim), geometry.cache_dtype)] * 2
        scratch += [compat.barriers(1, geometry.pages_of_tile)] * 2
    if compat.interpreted():
        scratch.append(compat.swizzled_smem((COMPUTE, TILE_ROWS, tile_kv), geometry.dtype))
    out = compat.kernel(
        attention_prefill,
        out_type=jax.ShapeDtypeStruct((num_tokens, head_tiles, geometry.heads, head_dim), q.dtype),
        scratch_types=scratch,
        grid=(num_tiles * head_tiles,),
        grid_names=("cta",),
        num_threads=COMPUTE + 1,
        thread_name="warpgroup",
        approx_math=True,
        auto_barriers=False,
    )(
        geometry.queries(q),
        geometry.pages(blocks),
        jnp.reshape(layer, (1,)),
        metadata.block_table,
        metadata.seq_lens,
        metadata.query_start_loc,
        tile_request,
        tile_offset,
        sink_rows(sinks, geometry),
        *([] if kv_scales is None else [kv_scales]),
    )
    return out.reshape(q.shape)
