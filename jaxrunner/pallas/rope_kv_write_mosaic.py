"""Norm and rotation of queries and keys and the KV write as one Mosaic GPU kernel, from the fused projection.

A piece of work is a few heads of q, k or v of one token; both halves of a rotated pair are in the same thread. Small
steps give each piece a CTA of its own, long ones all pieces of a token one CTA. Everything is rounded where the XLA
composition rounds it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat, implementation
from jaxrunner.pallas.kv_write_mosaic import float8
from jaxrunner.state.kv_cache import KEY, VALUE
from jaxrunner.state.kv_dtype import FLOAT8_BYTES

MAX_HEADS_OF_PIECE = 8
MANY_TOKENS = 512
"""From so many tokens on, a CTA does all pieces of its token."""


def reason_against(qkv: Any, blocks: Any) -> str | None:
    """Why the kernel cannot take these arrays on any machine, or None."""
    if qkv.dtype not in (jnp.bfloat16, jnp.float16) or blocks.dtype not in (qkv.dtype, FLOAT8_BYTES):
        return (
            "it needs a projection of bfloat16 or float16 and a cache of its type or of float8, "
            f"not {qkv.dtype} and {blocks.dtype}"
        )
    if blocks.shape[5] % 16:
        return f"it needs a head size that is a multiple of 16, not {blocks.shape[5]}"
    return None


def rope_kv_write_mosaic(
    qkv: jax.Array,
    blocks: jax.Array,
    layer: jax.Array,
    slot_mapping: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    kv_scales: jax.Array | None = None,
    whole_tokens: bool | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `rope_kv_write` for the arguments and the result.

    whole_tokens: one CTA a token instead of one a piece; by default chosen from the number of tokens.
    Raises ImplementationError where Mosaic GPU kernels cannot run or take this case.
    """
    implementation.refuse("rope_kv_write", "mosaic", None, reason_against(qkv, blocks))
    num_tokens, _, head_dim = qkv.shape
    num_layers, _, num_blocks, block_size, num_kv_heads, _ = blocks.shape
    num_heads, dtype = qkv.shape[1] - 2 * num_kv_heads, qkv.dtype
    if whole_tokens is None:
        whole_tokens = num_tokens >= MANY_TOKENS
    # One size for all: the same cosines in two layouts are more than layout inference can solve.
    heads = _heads_of_piece(math.gcd(num_heads, num_kv_heads))
    pieces = [("q", num_heads // heads), ("k", num_kv_heads // heads), ("v", num_kv_heads // heads)]
    norms = {"q": q_norm, "k": k_norm}

    extra = [] if rope is None else list(rope)
    extra += [weight for weight in norms.values() if weight is not None]
    extra += [] if kv_scales is None else [kv_scales]

    def rope_kv_write(qkv_ref, slots, layer_ref, *refs):
        *extra_refs, cache, q_ref = refs
        scales_ref = None if kv_scales is None else extra_refs.pop()
        cos_ref, sin_ref, extra_refs = (None, None, extra_refs) if rope is None else (*extra_refs[:2], extra_refs[2:])
        norm_refs = dict(zip((kind for kind in norms if norms[kind] is not None), extra_refs, strict=False))

        def pair(kind, token, first):
            """A piece of q or k: its halves, normed and rotated, in the model's type."""
            heads_ref = qkv_ref.at[token, compat.ds(first, heads)]
            rope_refs = None if cos_ref is None else (cos_ref.at[token], sin_ref.at[token])
            return rotated_halves(heads_ref, rope_refs, norm_refs.get(kind), eps)

        def load_piece(kind, token, first):
            if kind == "v":
                start = num_heads + num_kv_heads + first
                part = compat.ds(0, head_dim)
                layout = compat.rows_layout(heads, head_dim, dtype.itemsize)
                source = qkv_ref.at[token, compat.ds(start, heads), part]
                return [(part, compat.load(source, layout=layout, optimized=False))]
            return pair(kind, token, first if kind == "q" else num_heads + first)

        def store_piece(kind, token, first, values):
            here = compat.ds(first, heads)
            if kind == "q":
                for part, value in values:
                    q_ref[token, here, part] = value
                return
            slot = slots[token]

            @compat.when(slot >= 0)
            def _():
                which = KEY if kind == "k" else VALUE
                block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
                block += (layer_ref[0] * 2 + which) * num_blocks
                inverse = None if scales_ref is None else 1.0 / scales_ref[layer_ref[0], which]
                for part, value in values:
                    if inverse is not None:
                        layout = compat.rows_layout(*value.shape, dtype.itemsize)
                        value = float8(value, inverse, layout)
                    cache[block, offset, here, part] = value

        cta = lax.axis_index("cta")
        if whole_tokens:
            work = [(kind, cta, i * heads) for kind, count in pieces for i in range(count)]
            loaded = [load_piece(*item) for item in work]
            for item, values in zip(work, loaded, strict=True):
                store_piece(*item, values)
            return
        total = sum(count for _, count in pieces)
        token, piece = lax.div(cta, jnp.int32(total)), lax.rem(cta, jnp.int32(total))
        begin = 0
        for kind, count in pieces:

            @compat.when((piece >= begin) & (piece < begin + count))
            def _(kind=kind, begin=begin):
                item = (kind, token, (piece - begin) * heads)
                store_piece(*item, load_piece(*item))

            begin += count

    target = compat.in_place(blocks.reshape(num_layers * 2 * num_blocks, block_size, num_kv_heads, head_dim))
    q = compat.kernel(
        rope_kv_write,
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), dtype),
        grid=(num_tokens if whole_tokens else num_tokens * sum(count for _, count in pieces),),
        grid_names=("cta",),
        auto_barriers=False,
    )(qkv, slot_mapping, jnp.reshape(layer, (1,)), *extra, target)
    return q, target[...].reshape(blocks.shape)


def rotated_halves(
    heads_ref: Any, rope_refs: tuple[Any, Any] | None, norm_ref: Any | None, eps: float, *, layout: Any = None
) -> list[tuple[Any, jax.Array]]:
    """Both halves of some heads of one token as (slice of the columns, value), normed and rotated, in their type.

    heads_ref: [heads, D]. rope_refs: cosines and sines of the token, f32[D / 2]. norm_ref: [D]. layout: of the
    values; by default the best for GMEM.
    """
    heads, head_dim = heads_ref.shape
    half, dtype = head_dim // 2, heads_ref.dtype
    layout = layout or compat.rows_layout(heads, half, dtype.itemsize)
    column = layout.reduce(0)
    parts = [compat.ds(0, half), compat.ds(half, half)]
    x = [compat.load(heads_ref.at[:, part], layout=layout, optimized=False) for part in parts]
    x = [value.astype(jnp.float32) for value in x]

    def across(vector):
        return compat.spread(vector.astype(jnp.float32), (heads, half), 1, layout)

    if norm_ref is not None:
        square = (x[0] * x[0]).sum(axis=1) + (x[1] * x[1]).sum(axis=1)
        scale = compat.spread(lax.rsqrt(square * (1.0 / head_dim) + eps), (heads, half), 0, layout)
        weights = [compat.load(norm_ref.at[part], layout=column, optimized=False) for part in parts]
        x = [(value * scale).astype(dtype).astype(jnp.float32) for value in x]
        x = [(value * across(w)).astype(dtype).astype(jnp.float32) for value, w in zip(x, weights, strict=True)]
    if rope_refs is not None:
        cos, sin = (across(compat.load(ref, layout=column, optimized=False)) for ref in rope_refs)
        x = [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin]
    return [(part, value.astype(dtype)) for part, value in zip(parts, x, strict=True)]


def _heads_of_piece(heads: int) -> int:
    return next(n for n in range(min(heads, MAX_HEADS_OF_PIECE), 0, -1) if heads % n == 0)
