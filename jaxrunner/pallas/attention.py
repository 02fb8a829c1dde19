"""Paged attention over the KV cache: one op for uniform decodes and for ragged, causal mixed batches.

The XLA implementations walk the keys in chunks of whole blocks with a running softmax, as far as the longest request
of the step reaches, so their cost follows the real context and not the padded table. The chunk is fixed, hence a
result does not depend on the width of the table. They are the specification of the Mosaic GPU kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

from jaxrunner.pallas import custom_attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.pallas.kv_write import scales_for
from jaxrunner.state.kv_cache import KEY, VALUE
from jaxrunner.state.kv_dtype import from_bytes

CHUNK_TOKENS = 128
QUERY_TILE = 64
NEG_INF = float("-inf")


def attention(
    q: Float[Array, "T H D"],
    blocks: Num[Array, "L 2 N P KVH D"],
    layer: Int32[Array, ""],
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    kv_scales: Float32[Array, "L 2"] | None = None,
    implementation: Implementation = None,
) -> Float[Array, "T H D"]:
    """Causal attention of each query over its request's keys up to its own position.

    q: queries in flat token order, H a multiple of KVH. blocks, layer: as in `kv_write`; the step's own keys are
    already there. metadata: of the layer's KV-cache group. scale: multiplies the scores. window: number of most
    recent keys seen, the query's own included; None for all. soft_cap: scores become soft_cap * tanh(score / soft_cap)
    (Gemma 2). sinks: a logit a head that takes part in the softmax and has no value (gpt-oss). kv_scales: factors of
    the keys and of the values in a float8 cache, ones by default. The result has the type of q.

    Rows without keys give zeros. Whatever lies in dead blocks, past the end of a request or behind padded rows of the
    tables (NaN included) does not enter the result.

    implementation: a function takes the place of this op, see `jaxrunner.pallas.custom_attention`.

    Raises ImplementationError where a named implementation cannot run or take this case.
    """
    kv_scales = scales_for(blocks, kv_scales)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    if kv_scales is not None:
        options["kv_scales"] = kv_scales
    if attend := custom_attention.custom(implementation):
        return custom_attention.call(attend, q, blocks, layer, metadata, **options)
    run: Callable[..., Any] = attention_xla
    chosen = chosen_attention(q, blocks, scale, soft_cap, implementation)
    if chosen == "reference":
        from jaxrunner.pallas.attention_reference import attention_reference as run
    elif chosen == "triton":
        run = attention_triton.attention_triton
    elif chosen == "mosaic":
        if metadata.query_len is not None:
            from jaxrunner.pallas.attention_decode_mosaic import decode_attention as run
        else:
            from jaxrunner.pallas.attention_prefill_mosaic import ragged_attention as run
    return run(q, blocks, layer, metadata, **options)


def chosen_attention(q: Any, blocks: Any, scale: float, soft_cap: float | None, implementation: Implementation) -> str:
    """The implementation that `attention` takes: a name of `implementation.AVAILABLE`, or "custom" for a function.

    Raises ImplementationError where a named one cannot run or take this case.
    """
    from jaxrunner.pallas import attention_mosaic, attention_triton

    if custom_attention.custom(implementation):
        return "custom"
    against = {
        "mosaic": attention_mosaic.reason_against(q, blocks, scale, soft_cap),
        "triton": attention_triton.reason_against(q, blocks, soft_cap),
    }
    return resolve("attention", implementation, against)


def attention_xla(q, blocks, layer, metadata, *, scale, window=None, soft_cap=None, sinks=None, kv_scales=None):
    """See `attention`; this is its specification."""
    run = _decode_xla if metadata.query_len is not None else _ragged_xla
    value_scale = 1.0
    if kv_scales is not None:
        scale, value_scale = scale * kv_scales[layer, KEY], kv_scales[layer, VALUE]
    result = run(q, blocks, layer, metadata, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
    return (result * value_scale).astype(q.dtype)


def _chunk_blocks(width: int, block_size: int) -> int:
    """Blocks in a chunk: a power of two that divides the table's width (a multiple of 128)."""
    chunk = max(1, CHUNK_TOKENS // block_size)
    while width % chunk:
        chunk -= 1
    return chunk


def _load(blocks, layer, which, ids):
    """Keys or values of some blocks: ids [..., c] -> [..., c * block_size, KVH, D] in float32."""
    data = from_bytes(blocks[layer, which, ids]).astype(jnp.float32)
    return data.reshape(*ids.shape[:-1], -1, *data.shape[-2:])


def _start(rows, head_dim):
    """(top, total, sum of values) of a running softmax that has seen nothing."""
    f32 = jnp.float32
    return jnp.full(rows, NEG_INF, f32), jnp.zeros(rows, f32), jnp.zeros((*rows, head_dim), f32)


def _update(carry, scores, mask, values, product):
    """One step of the running softmax. scores, mask: [..., q, c]; product contracts c with the values."""
    top, total, acc = carry
    scores = jnp.where(mask, scores, NEG_INF)
    new_top = jnp.maximum(top, scores.max(axis=-1))
    finite_top = jnp.where(new_top == NEG_INF, 0.0, new_top)
    p = jnp.exp(scores - finite_top[..., None])
    keep = jnp.exp(jnp.where(top == NEG_INF, NEG_INF, top - finite_top))
    return new_top, total * keep + p.sum(axis=-1), acc * keep[..., None] + product(p, values)


def _capped(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _finish(carry, sinks):
    """The result of a running softmax. sinks: shaped like the rows' totals, or None."""
    top, total, acc = carry
    if sinks is None:
        return acc / jnp.where(total > 0, total, 1.0)[..., None]
    highest = jnp.maximum(top, sinks)
    keep = jnp.exp(top - highest)
    return acc * (keep / (total * keep + jnp.exp(sinks - highest)))[..., None]


def _decode_xla(q, blocks, layer, metadata, *, scale, window, soft_cap, sinks):
    """Every request has metadata.query_len queries: one batched product over requests and KV heads."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = blocks.shape[4], blocks.shape[3]
    batch, width = metadata.block_table.shape
    query_len, group = metadata.query_len, num_heads // num_kv_heads
    # [B, KVH, G * Q, D]: the queries that share a KV head are the rows of one product.
    q = q.reshape(batch, query_len, num_kv_heads, group, head_dim).astype(jnp.float32) * scale
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, group * query_len, head_dim)
    position = metadata.seq_lens[:, None] - query_len + jnp.arange(query_len, dtype=jnp.int32)[None, :]
    position = jnp.tile(position, (1, group))[:, None, :]

    chunk = _chunk_blocks(width, block_size)
    chunk_tokens = chunk * block_size

    def body(c, carry):
        ids = lax.dynamic_slice_in_dim(metadata.block_table, c * chunk, chunk, axis=1)
        k, v = _load(blocks, layer, KEY, ids), _load(blocks, layer, VALUE, ids)
        key_position = c * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
        exists = key_position[None, :] < metadata.seq_lens[:, None]
        mask = exists[:, None, None, :] & (key_position <= position[..., None])
        if window is not None:
            mask &= key_position > position[..., None] - window
            exists &= key_position[None, :] > (metadata.seq_lens - query_len - window)[:, None]
        scores = _capped(jnp.einsum("bkqd,bckd->bkqc", q, k, precision="highest"), soft_cap)
        v = jnp.where(exists[..., None, None], v, 0.0)
        return _update(carry, scores, mask, v, functools.partial(jnp.einsum, "bkqc,bckd->bkqd", precision="highest"))

    rows = (batch, num_kv_heads, group * query_len)
    first = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(metadata.seq_lens > 0, metadata.seq_lens - query_len - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.clip(oldest.min(), 0) // chunk_tokens
    last = -(-metadata.seq_lens.max() // chunk_tokens)
    init = _start(rows, head_dim)
    carry = lax.fori_loop(first, last, body, init)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, group), query_len, axis=1)
    out = _finish(carry, sinks)
    out = out.reshape(batch, num_kv_heads, group, query_len, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(-1, num_heads, head_dim)


def _ragged_xla(q, blocks, layer, metadata, *, scale, window, soft_cap, sinks):
    """Tiles of up to QUERY_TILE queries of one request, one after the other, each over just the keys it sees."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = blocks.shape[4], blocks.shape[3]
    width = metadata.block_table.shape[1]
    group = num_heads // num_kv_heads
    tile = min(QUERY_TILE, num_tokens)
    chunk = _chunk_blocks(width, block_size)
    chunk_tokens = chunk * block_size

    starts = metadata.query_start_loc
    query_lens = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum(-(-query_lens // tile), dtype=jnp.int32)
    padded = jnp.pad(q.astype(jnp.float32) * scale, ((0, tile), (0, 0), (0, 0)))

    def run_tile(i, out):
        request = jnp.searchsorted(tile_ends, i, side="right").astype(jnp.int32)
        inner = i - (tile_ends[request] - -(-query_lens[request] // tile))
        start = starts[request] + inner * tile
        seq_len = metadata.seq_lens[request]
        row = inner * tile + jnp.arange(tile, dtype=jnp.int32)
        position = seq_len - query_lens[request] + row
        queries = lax.dynamic_slice_in_dim(padded, start, tile).reshape(tile, num_kv_heads, group, head_dim)
        table = metadata.block_table[request]

        def body(c, carry):
            ids = lax.dynamic_slice_in_dim(table, c * chunk, chunk)
            k, v = _load(blocks, layer, KEY, ids), _load(blocks, layer, VALUE, ids)
            key_position = c * chunk_tokens + jnp.arange(chunk_tokens, dtype=jnp.int32)
            exists = key_position < seq_len
            mask = exists & (key_position <= position[:, None])
            if window is not None:
                mask &= key_position > position[:, None] - window
                exists &= key_position > position[0] - window
            scores = _capped(jnp.einsum("qkgd,ckd->kgqc", queries, k, precision="highest"), soft_cap)
            v = jnp.where(exists[:, None, None], v, 0.0)
            product = functools.partial(jnp.einsum, "kgqc,ckd->kgqd", precision="highest")
            return _update(carry, scores, mask, v, product)

        first = jnp.int32(0) if window is None else jnp.clip(position[0] - window + 1, 0) // chunk_tokens
        last = -(-jnp.minimum(position[-1] + 1, seq_len) // chunk_tokens)
        rows = (num_kv_heads, group, tile)
        init = _start(rows, head_dim)
        carry = lax.fori_loop(first, last, body, init)
        by_row = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, group, 1)
        result = _finish(carry, by_row).transpose(2, 0, 1, 3)
        result = jnp.where((row < query_lens[request])[:, None, None, None], result, 0.0)
        # A tile's tail may cover the next request's rows; tiles run in order, so those are written after it.
        return lax.dynamic_update_slice_in_dim(out, result.reshape(tile, num_heads, head_dim), start, axis=0)

    out = jnp.zeros((num_tokens + tile, num_heads, head_dim), jnp.float32)
    return lax.fori_loop(jnp.int32(0), tile_ends[-1], run_tile, out)[:num_tokens]
