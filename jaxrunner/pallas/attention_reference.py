"""Paged attention in its plainest form: one dense, masked softmax over the whole width of the block table.

It is the specification in a few lines, for decodes and ragged batches alike, and it can be differentiated: the other
implementations walk the keys in loops whose length depends on the data, which have no reverse mode. Every request of
the bucket gets scores for as many queries as the bucket has tokens, over the whole width of its table, so it is for
gradients and for short contexts: take a bucket with few requests.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.state.kv_cache import KEY, VALUE
from jaxrunner.state.kv_dtype import from_bytes


def attention_reference(
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
) -> Float[Array, "T H D"]:
    """As `jaxrunner.pallas.attention.attention`. Gradients flow to q and, through the cache unless it
    is float8, to the keys and values.

    Holds f32[B, H, Q, W * P] scores: B requests, Q = T queries of each (query_len in a decode), W * P slots of a table.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = blocks.shape[4]
    starts, seq_lens = metadata.query_start_loc, metadata.seq_lens
    ends, num_requests = starts[1:], seq_lens.shape[0]
    width = metadata.query_len or num_tokens

    # [B, Q, ...]: the queries of each request, from its first on; entries past its last are masked.
    token = starts[:-1, None] + jnp.arange(width)
    queries = q[jnp.minimum(token, num_tokens - 1)].astype(jnp.float32) * scale
    queries = queries.reshape(num_requests, width, num_kv_heads, -1, head_dim)
    position = (seq_lens - ends)[:, None] + token
    slot = jnp.arange(metadata.block_table.shape[1] * blocks.shape[3])
    exists = slot < seq_lens[:, None]
    seen = exists[:, None, :] & (slot <= position[..., None]) & (token < ends[:, None])[..., None]
    if window is not None:
        seen &= slot > position[..., None] - window
        exists &= slot > (seq_lens - (ends - starts[:-1]) - window)[:, None]  # seen by the first query or later ones

    # Zeroed before the products: what lies in dead slots may be NaN, and 0 * NaN is NaN, in a gradient as well.
    keys, values = (
        jnp.where(
            exists[..., None, None],
            from_bytes(blocks[layer, which, metadata.block_table])
            .reshape(num_requests, -1, num_kv_heads, head_dim)
            .astype(jnp.float32),
            0.0,
        )
        for which in (KEY, VALUE)
    )
    if kv_scales is not None:
        keys, values = keys * kv_scales[layer, KEY], values * kv_scales[layer, VALUE]
    mask = seen[:, None, None]
    scores = jnp.einsum("bqkgd,bskd->bkgqs", queries, keys, precision="highest")
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    sink = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1, 1)
    top = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0) if sink is None else jnp.maximum(top, sink)
    weight = jnp.where(mask, jnp.exp(jnp.where(mask, scores - top, 0.0)), 0.0)
    total = weight.sum(axis=-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weight / jnp.where(total > 0, total, 1.0), values, precision="highest")

    request = jnp.minimum(jnp.searchsorted(ends, jnp.arange(num_tokens), side="right"), num_requests - 1)
    flat = out[request, jnp.clip(jnp.arange(num_tokens) - starts[request], 0, width - 1)]
    live = jnp.arange(num_tokens) < starts[-1]
    return jnp.where(live[:, None, None], flat.reshape(num_tokens, num_heads, head_dim), 0.0).astype(q.dtype)
