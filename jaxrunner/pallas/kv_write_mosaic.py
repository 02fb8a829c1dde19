"""KV write as a Mosaic GPU kernel: in place, one CTA for some tokens, whole rows of all KV heads at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat, implementation
from jaxrunner.state.kv_cache import KEY, VALUE
from jaxrunner.state.kv_dtype import FLOAT8, FLOAT8_MAX, to_bytes

TOKENS_PER_CTA = 1


def float8(rows: jax.Array, inverse: jax.Array, layout: Any) -> jax.Array:
    """Bytes of `kv_write.quantised`, inside of a kernel. rows: in `layout`. inverse: 1 / scale, a float32 scalar."""
    scaled = rows.astype(jnp.float32) * compat.repeated(inverse, rows.shape, layout)
    return to_bytes(jnp.minimum(jnp.maximum(scaled, -FLOAT8_MAX), FLOAT8_MAX).astype(FLOAT8))


def reason_against(blocks: Any) -> str | None:
    """Why the kernel cannot take this cache on any machine, or None."""
    num_kv_heads, head_dim = blocks.shape[4:]
    if num_kv_heads * head_dim < compat.LANES or head_dim % 16:
        return (
            f"it needs rows of {compat.LANES} elements or more and a head size that is a multiple of 16, "
            f"this cache has {num_kv_heads} heads of {head_dim}"
        )
    return None


def kv_write_mosaic(
    blocks: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    kv_scales: jax.Array | None = None,
    tokens_per_cta: int = TOKENS_PER_CTA,
) -> jax.Array:
    """See `kv_write` for the arguments and the result.

    tokens_per_cta: tokens of a CTA, all loaded before any is stored.
    Raises ImplementationError where Mosaic GPU kernels cannot run or take this case.
    """
    num_layers, _, num_blocks, block_size, num_kv_heads, head_dim = blocks.shape
    width, num_tokens = num_kv_heads * head_dim, k.shape[0]
    implementation.refuse("kv_write", "mosaic", None, reason_against(blocks))
    # A row is one vector; where 128 does not divide it, two that overlap.
    vector = width - width % compat.LANES
    starts = (0,) if vector == width else (0, width - vector)
    source_dtype = blocks.dtype if kv_scales is None else k.dtype
    layout = compat.strided(vector, source_dtype.itemsize)
    scales = [] if kv_scales is None else [kv_scales]

    def kv_write(k_ref, v_ref, slots, layer_ref, *refs):
        *scale_refs, cache = refs
        tokens = [lax.axis_index("cta") * tokens_per_cta + i for i in range(tokens_per_cta)]
        tokens = [jnp.minimum(token, num_tokens - 1) for token in tokens] if tokens_per_cta > 1 else tokens
        rows = [slots[token] for token in tokens]
        for which, source in ((KEY, k_ref), (VALUE, v_ref)):
            base = (layer_ref[0] * 2 + which) * num_blocks
            values = [
                [compat.load(source.at[token, compat.ds(start, vector)], layout=layout) for start in starts]
                for token in tokens
            ]
            if scale_refs:
                inverse = 1.0 / scale_refs[0][layer_ref[0], which]
                values = [[float8(part, inverse, layout) for part in parts] for parts in values]
            for slot, parts in zip(rows, values, strict=True):

                @compat.when(slot >= 0)
                def _(slot=slot, parts=parts, base=base):
                    block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
                    for start, part in zip(starts, parts, strict=True):
                        cache[base + block, offset, compat.ds(start, vector)] = part

    target = compat.in_place(blocks.reshape(num_layers * 2 * num_blocks, block_size, width))
    compat.kernel(
        kv_write,
        out_type=[],
        grid=(-(-num_tokens // tokens_per_cta),),
        grid_names=("cta",),
        auto_barriers=False,
    )(
        k.astype(source_dtype).reshape(num_tokens, width),
        v.astype(source_dtype).reshape(num_tokens, width),
        slot_mapping,
        jnp.reshape(layer, (1,)),
        *scales,
        target,
    )
    return target[...].reshape(blocks.shape)
