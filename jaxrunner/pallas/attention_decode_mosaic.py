"""Decode attention as Mosaic GPU kernels: every request has the same few queries, its keys are split over CTAs.

A CTA is one warpgroup with some queries, a KV head, and a share of a request's key tiles; several fit an SM and keep
each other's copies in flight. How many shares a request really has is decided on the device from its length: short
ones are finished by one CTA, which writes the result; else each share leaves its result and the logarithm of its
softmax sum, and the share that ends last combines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import attention_decode_columns_mosaic as by_columns
from jaxrunner.pallas import attention_decode_rows_mosaic as by_rows
from jaxrunner.pallas import compat, implementation
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_mosaic import (
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
from jaxrunner.pallas.rope_kv_write import queries_of
from jaxrunner.pallas.target import target
from jaxrunner.pallas.tuned_sizes import sizes_for

NUM_CORES = 132
"""Multiprocessors where the target does not say."""
MIN_TILES_OF_SPLIT = 2


class Rule(NamedTuple):
    """kernel: the module of it. ctas: with one share a request. at_once: CTAs that the GPU holds. stages: in flight."""

    kernel: Any
    ctas: int
    at_once: int
    stages: int


def geometry_of(q: Any, blocks: Any, tile_kv: int) -> Geometry:
    """Of a call. tile_kv: keys of a tile."""
    num_blocks, block_size, num_kv_heads, head_dim = blocks.shape[2:]
    return Geometry(q.shape[1], num_kv_heads, head_dim, block_size, num_blocks, tile_kv, blocks.dtype, q.dtype)


def rule_for(geometry: Geometry, batch: int, query_len: int) -> Rule:
    """What does a decode of these shapes, where nothing was measured to be better."""
    kernel: Any = by_columns if by_columns.takes(geometry, query_len) else by_rows
    tokens = min(query_len, geometry.tokens)
    ctas = batch * geometry.num_kv_heads * geometry.head_tiles * -(-query_len // tokens)
    return Rule(kernel, ctas, kernel.ctas_of_sm(ctas) * (target().num_cores or NUM_CORES), kernel.stages(ctas))


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
    out, _ = _decode(
        q,
        None,
        blocks,
        layer,
        metadata,
        Options(scale, window, soft_cap),
        sinks,
        kv_scales,
        num_splits=num_splits,
        tile_kv=tile_kv,
        stages=stages,
        min_tiles=min_tiles,
    )
    return out


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
    min_tiles: int = MIN_TILES_OF_SPLIT,
) -> tuple[jax.Array, jax.Array]:
    """See `attention_with_rope` for the arguments and the result, `decode_attention` for num_splits and min_tiles.

    Raises ImplementationError where the kernels cannot run or take this case.
    """
    queries = queries_of(qkv, blocks)
    refuse(queries, blocks, scale, None)
    implementation.refuse("attention_with_rope", "mosaic", None, reason_against_rope(qkv, blocks, metadata))
    operands = [qkv, metadata.slot_mapping, *(rope or ())]
    if q_norm is not None and k_norm is not None:
        operands += [q_norm, k_norm]

    def fresh_of(refs):
        qkv_ref, slots_ref, *refs = refs
        rope_refs, norm_refs = (tuple(refs[:2]), refs[2:]) if rope else (None, refs)
        q_norm_ref, k_norm_ref = norm_refs or (None, None)
        return Fresh(qkv_ref, slots_ref, rope_refs, q_norm_ref, k_norm_ref, eps)

    options, fresh = Options(scale, window, None), (operands, fresh_of)
    sizes: dict[str, Any] = {"num_splits": num_splits, "min_tiles": min_tiles}
    return _decode(queries, fresh, blocks, layer, metadata, options, None, None, **sizes)


def reason_against_rope(qkv: Any, blocks: Any, metadata: AttentionMetadata) -> str | None:
    """Why the kernel cannot take a projection as it is, whatever `attention_mosaic.reason_against` says; or None."""
    if metadata.query_len != 1:
        return "it needs one token of each request"
    if qkv.dtype != blocks.dtype:
        return f"it needs a cache of the projection's type, not {qkv.dtype} and {blocks.dtype}"
    geometry = geometry_of(queries_of(qkv, blocks), blocks, default_tile_kv(qkv.shape[2], prefill=False))
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
    shape = shape_of(q, blocks, metadata.query_len)
    tuned = sizes_for("attention_decode", batch=metadata.block_table.shape[0], **shape)
    head_dim, num_kv_heads = q.shape[2], blocks.shape[4]
    if fresh is None:
        tile_kv = tile_kv or tuned.get("tile_kv")
    geometry = geometry_of(q, blocks, tile_kv or default_tile_kv(head_dim, prefill=False))
    batch, query_len = metadata.block_table.shape[0], metadata.query_len
    assert query_len is not None, "a ragged batch is for ragged_attention"
    kernel, ctas, at_once, default_stages = rule_for(geometry, batch, query_len)
    tokens = min(query_len, geometry.tokens)
    token_tiles = -(-query_len // tokens)
    head_tiles = num_kv_heads * geometry.head_tiles
    splits = num_splits or tuned.get("num_splits") or default_splits(ctas, at_once)
    stages = stages or tuned.get("stages") or default_stages
    call = Call(geometry, options, query_len, tokens, splits, stages)

    partial_shape = (batch, token_tiles, head_tiles, splits, tokens * geometry.heads, head_dim)
    out_type = [jax.ShapeDtypeStruct((batch * query_len, head_tiles, geometry.heads, head_dim), q.dtype)]
    if splits > 1:
        out_type += [
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct((*partial_shape[:4], TILE_ROWS), jnp.float32),
        ]
    first, last = call.tile_range(metadata.seq_lens)
    operands = {
        "layer": jnp.reshape(layer, (1,)),
        "table": metadata.block_table,
        "seq_lens": metadata.seq_lens,
        "largest": tiles_of_share(last - first, head_tiles * token_tiles, splits, min_tiles, at_once),
    }
    if ctas > at_once:  # in one round all CTAs begin at once
        operands["order"] = longest_first(last - first)
    if sinks is not None:
        operands["sinks"] = sink_rows(sinks, geometry)
    if kv_scales is not None:
        operands["scales"] = kv_scales
    if splits > 1:
        counters = metadata.counters
        operands["counters"] = compat.in_place(jnp.zeros(ctas, jnp.int32)) if counters is None else counters
    q_operands, of_refs = ([geometry.queries(q)], lambda refs: refs[0]) if fresh is None else fresh

    def attention_decode(*refs):
        read, refs = dict(zip(operands, refs, strict=False)), refs[len(operands) :]
        q_refs, (kv_ref, out_ref, *others) = refs[: len(q_operands)], refs[len(q_operands) :]
        partial_refs, scratch = others[: len(out_type) - 1], others[len(out_type) - 1 :]
        index = lax.axis_index("cta")
        head, index = lax.rem(index, jnp.int32(head_tiles)), lax.div(index, jnp.int32(head_tiles))
        token_tile, index = lax.rem(index, jnp.int32(token_tiles)), lax.div(index, jnp.int32(token_tiles))
        split, b = lax.rem(index, jnp.int32(splits)), lax.div(index, jnp.int32(splits))
        b = read["order"][b] if "order" in read else b
        share = call.share_of(read["seq_lens"][b], read["largest"][0], split)

        @compat.when(split < share.shares)
        def _():
            arrays = Arrays(
                q=of_refs(q_refs),
                kv=kv_ref,
                layer=read["layer"],
                table=read["table"],
                seq_lens=read["seq_lens"],
                sinks=read.get("sinks"),
                scales=read.get("scales"),
                out=out_ref,
                partials=partial_refs,
                counters=read.get("counters"),
            )
            kernel.attend(call, arrays, tuple(scratch), Place(b, token_tile, head, split, share))

    pages = geometry.pages(blocks)
    if fresh is not None:
        attention_decode.__name__ = "attention_with_rope"
        pages = compat.in_place(pages)
    out, *_ = compat.kernel(
        attention_decode,
        out_type=out_type,
        scratch_types=kernel.scratch(call),
        grid=(ctas * splits,),
        grid_names=("cta",),
        approx_math=True,
        auto_barriers=False,
        reduction_bytes=1024,
    )(*operands.values(), *q_operands, pages)
    return out.reshape(q.shape), blocks if fresh is None else pages[...].reshape(blocks.shape)
