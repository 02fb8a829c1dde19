"""Decode attention as Mosaic GPU kernels: every request has the same few queries, its keys are split over CTAs.

A CTA is one warpgroup with some queries, a KV head, and a share of a request's key tiles; several fit an SM and keep
each other's copies in flight. How many shares a request really has is decided on the device from its length: short
ones are finished by one CTA, which writes the result; else each share leaves its result and the logarithm of its
softmax sum, and the share that ends last combines them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import attention_decode_columns_mosaic as by_columns
from jaxrunner.pallas import attention_decode_rows_mosaic as by_rows
from jaxrunner.pallas import compat, implementation
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_mosaic import (
    NEG_INF,
    TILE_ROWS,
    Geometry,
    Options,
    default_tile_kv,
    refuse,
    shape_of,
    sink_rows,
)
from jaxrunner.pallas.attention_shares import (
    Arrays,
    Call,
    Fresh,
    Place,
    default_splits,
    longest_first,
    tiles_of_share,
)
from jaxrunner.pallas.target import target
from jaxrunner.pallas.tuned_sizes import sizes_for

NUM_CORES = 132
"""Multiprocessors where the target does not say."""
MIN_TILES_OF_SPLIT = 2


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
    sizes = {"num_splits": num_splits, "tile_kv": tile_kv, "stages": stages, "min_tiles": min_tiles}
    return _decode(q, None, blocks, layer, metadata, options, sinks, kv_scales, **sizes)[0]


def decode_attention_with_rope(
    qkv: jax.Array,
    blocks: jax.Array,
    layer: jax.Array,
    metadata: AttentionMetadata,
    rope: tuple[jax.Array, jax.Array] | None,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int | None = None,
    num_splits: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `attention_with_rope` for the arguments and the result, `decode_attention` for num_splits.

    Raises ImplementationError where the kernels cannot run or take this case.
    """
    queries = qkv[:, : qkv.shape[1] - 2 * blocks.shape[4]]
    refuse(queries, blocks, scale, None)
    implementation.refuse("attention_with_rope", "mosaic", None, reason_against_rope(qkv, blocks, metadata))
    norms = [] if q_norm is None else [q_norm, k_norm]
    operands = [qkv, metadata.slot_mapping, *(rope or ()), *norms]

    def fresh_of(refs):
        qkv_ref, slots_ref, *refs = refs
        rope_refs, norm_refs = (tuple(refs[:2]), refs[2:]) if rope else (None, refs)
        return Fresh(qkv_ref, slots_ref, rope_refs, *(norm_refs or (None, None)), eps)

    options = Options(scale, window, None)
    return _decode(queries, (operands, fresh_of), blocks, layer, metadata, options, None, None, num_splits=num_splits)


def reason_against_rope(qkv: Any, blocks: Any, metadata: AttentionMetadata) -> str | None:
    """Why the kernel cannot take a projection as it is, whatever `attention_mosaic.reason_against` says; or None."""
    num_heads, head_dim = qkv.shape[1] - 2 * blocks.shape[4], qkv.shape[2]
    if metadata.query_len != 1:
        return "it needs one token of each request"
    if qkv.dtype != blocks.dtype:
        return f"it needs a cache of the projection's type, not {qkv.dtype} and {blocks.dtype}"
    tile_kv = default_tile_kv(head_dim, prefill=False)
    geometry = Geometry(num_heads, *blocks.shape[4:], *blocks.shape[3:1:-1], tile_kv, blocks.dtype, qkv.dtype)
    return None if by_columns.takes_projection(geometry) else "it needs heads of 128 and at most 16 of them a KV head"


def _decode(
    q: Any,
    fresh: tuple[list[jax.Array], Callable[[Any], Fresh]] | None,
    blocks: jax.Array,
    layer: jax.Array,
    metadata: AttentionMetadata,
    options: Options,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    *,
    num_splits: int | None = None,
    tile_kv: int | None = None,
    stages: int | None = None,
    min_tiles: int = MIN_TILES_OF_SPLIT,
) -> tuple[jax.Array, jax.Array]:
    """(result, blocks). fresh: operands and what makes a `Fresh` of their references, in place of q."""
    num_heads, head_dim = q.shape[1:]
    num_blocks, block_size, num_kv_heads = blocks.shape[2:5]
    shape = shape_of(q, blocks, metadata.query_len)
    tuned = sizes_for("attention_decode", batch=metadata.block_table.shape[0], **shape)
    tile_kv = tile_kv or tuned.get("tile_kv") or default_tile_kv(head_dim, prefill=False)
    geometry = Geometry(num_heads, num_kv_heads, head_dim, block_size, num_blocks, tile_kv, blocks.dtype, q.dtype)
    batch, query_len = metadata.block_table.shape[0], metadata.query_len
    assert query_len is not None, "a ragged batch is for ragged_attention"
    kernel: Any = by_columns if by_columns.takes(geometry, query_len) else by_rows
    tokens = min(query_len, geometry.tokens)
    token_tiles = -(-query_len // tokens)
    head_tiles = num_kv_heads * geometry.head_tiles
    ctas = batch * head_tiles * token_tiles
    at_once = kernel.ctas_of_sm(ctas) * (target().num_cores or NUM_CORES)
    splits = num_splits or tuned.get("num_splits") or default_splits(ctas, at_once)
    stages = stages or tuned.get("stages") or kernel.stages(ctas)
    call = Call(geometry, options, query_len, tokens, splits, stages)

    partial_shape = (batch, token_tiles, head_tiles, splits, tokens * geometry.heads, head_dim)
    out_type = [jax.ShapeDtypeStruct((batch * query_len, head_tiles, geometry.heads, head_dim), q.dtype)]
    if splits > 1:
        out_type += [
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct((*partial_shape[:4], TILE_ROWS), jnp.float32),
        ]
    first, last = call.tile_range(metadata.seq_lens)
    largest = tiles_of_share(last - first, head_tiles * token_tiles, splits, min_tiles, at_once)

    # In one round all CTAs begin at once.
    order = longest_first(last - first) if ctas > at_once else None

    q_operands, fresh_of = ([geometry.queries(q)], None) if fresh is None else fresh
    pages = geometry.pages(blocks)

    def attention_decode(layer_ref, table, seq_lens, largest_ref, sinks_ref, *refs):
        q_refs, refs = refs[: len(q_operands)], refs[len(q_operands) :]
        q_ref = q_refs[0] if fresh_of is None else fresh_of(q_refs)
        scales_ref = order_ref = None
        sinks_ref = None if sinks is None else sinks_ref
        if kv_scales is not None:
            scales_ref, refs = refs[0], refs[1:]
        if order is not None:
            order_ref, refs = refs[0], refs[1:]
        counters_ref = None
        if splits > 1:
            counters_ref, refs = refs[0], refs[1:]
        kv_ref, out_ref, *partial_refs = refs[: 1 + len(out_type)]
        scratch = refs[1 + len(out_type) :]
        index = lax.axis_index("cta")
        head, index = lax.rem(index, jnp.int32(head_tiles)), lax.div(index, jnp.int32(head_tiles))
        token_tile, index = lax.rem(index, jnp.int32(token_tiles)), lax.div(index, jnp.int32(token_tiles))
        split, b = lax.rem(index, jnp.int32(splits)), lax.div(index, jnp.int32(splits))
        b = b if order_ref is None else order_ref[b]
        share = call.share_of(seq_lens[b], largest_ref[0], split)

        @compat.when(split < share.shares)
        def _():
            read = (q_ref, kv_ref, layer_ref, table, seq_lens, sinks_ref, scales_ref)
            arrays = Arrays(*read, out_ref, partial_refs, counters_ref)
            kernel.attend(call, arrays, scratch, Place(b, token_tile, head, split, share))

    counters = metadata.counters
    if splits > 1 and counters is None:
        counters = compat.in_place(jnp.zeros(ctas, jnp.int32))
    kv = pages if fresh is None else compat.in_place(pages)
    if fresh is not None:
        attention_decode.__name__ = "attention_with_rope"
    out, *_ = compat.kernel(
        attention_decode,
        out_type=out_type,
        scratch_types=kernel.scratch(call),
        grid=(ctas * splits,),
        grid_names=("cta",),
        approx_math=True,
        auto_barriers=False,
        reduction_bytes=1024,
    )(
        jnp.reshape(layer, (1,)),
        metadata.block_table,
        metadata.seq_lens,
        largest,
        sink_rows(sinks, geometry),
        *q_operands,
        *([] if kv_scales is None else [kv_scales]),
        *([] if order is None else [order]),
        *([counters] if splits > 1 else []),
        kv,
    )
    return out.reshape(q.shape), blocks if fresh is None else kv[...].reshape(blocks.shape)
