"""Attentions as a user might write them, one right and the others wrong in one way each."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxrunner.pallas.attention import attention_xla


def dense(
    q, blocks, layer, metadata, *, scale, window=None, soft_cap=None, sinks=None, ahead=0, windowed=True, clean=True
):
    """Every query over every slot of its request's table. ahead: keys seen beyond its own position. clean: values
    that nobody sees are zeroed before the product."""
    tokens, _, head_dim = q.shape
    starts, kv_heads = metadata.query_start_loc, blocks.shape[4]
    request = jnp.minimum(jnp.searchsorted(starts[1:], jnp.arange(tokens), side="right"), len(starts) - 2)
    seq_len = metadata.seq_lens[request]
    position = seq_len - starts[request + 1] + jnp.arange(tokens)

    def of(which):
        pages = blocks[layer, which, metadata.block_table[request]]
        return pages.reshape(tokens, -1, kv_heads, head_dim).astype(jnp.float32)

    slot = jnp.arange(metadata.block_table.shape[1] * blocks.shape[3])
    seen = (slot <= position[:, None] + ahead) & (slot < seq_len[:, None])
    seen &= (jnp.arange(tokens) < starts[-1])[:, None]
    if window is not None and windowed:
        seen &= slot > position[:, None] - window
    queries = q.astype(jnp.float32).reshape(tokens, kv_heads, -1, head_dim)
    scores = jnp.einsum("tkgd,tskd->tkgs", queries, of(0), precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.reshape(kv_heads, -1, 1), (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], axis=-1)
    weight = jax.nn.softmax(scores, axis=-1)[..., : len(slot)]
    weight = jnp.where(seen[:, None, None], weight, 0.0)
    values = jnp.where(seen[..., None, None], of(1), 0.0) if clean else of(1)
    out = jnp.einsum("tkgs,tskd->tkgd", weight, values, precision="highest")
    return out.reshape(q.shape).astype(q.dtype)


right = dense
off_by_one = functools.partial(dense, ahead=1)
ignores_window = functools.partial(dense, windowed=False)
leaks_nan = functools.partial(dense, clean=False)
NOT_A_FUNCTION = 3


def without_sinks(q, blocks, layer, metadata, *, scale, window=None, soft_cap=None):
    return q


def wrong_type(q, *args, **options):
    return attention_xla(q, *args, **options).astype(jnp.float32)


def wrong_shape(q, *args, **options):
    return attention_xla(q, *args, **options)[:, 0]


def raises(q, blocks, layer, metadata, *, scale, window=None, soft_cap=None, sinks=None):
    raise RuntimeError("only head size 128")
