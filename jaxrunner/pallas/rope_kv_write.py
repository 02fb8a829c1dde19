"""What lies between the projection and the attention of a layer, as one op: norm and rotation of q and k, KV write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Num

from jaxrunner.models.layers import apply_rope, rms_norm
from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.pallas.kv_write import kv_write_xla, scales_for


def rope_kv_write(
    qkv: Float[Array, "T N D"],
    blocks: Num[Array, "L 2 B P KVH D"],
    layer: Int32[Array, ""],
    slot_mapping: Int32[Array, "T"],
    rope: tuple[Float32[Array, "T F"], Float32[Array, "T F"]] | None,
    *,
    q_norm: Float[Array, "D"] | None = None,
    k_norm: Float[Array, "D"] | None = None,
    eps: float = 1e-6,
    kv_scales: Float32[Array, "L 2"] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T H D"], Num[Array, "L 2 B P KVH D"]]:
    """(queries ready for attention, the cache with the step's keys and values written).

    qkv: heads of the fused projection, first all of q, then KVH of k, then KVH of v (N = H + 2 * KVH). They are taken
    whole: three slices would be three copies. blocks, layer, slot_mapping: as in `kv_write`; the cache is written in
    place when donated. rope: (cos, sin) of each token, see `rotary_table`; None for a layer without rotation.
    q_norm, k_norm: weights of the RMS norm over each head before the rotation, both or none; eps: of that norm.
    kv_scales: as in `kv_write`; queries are not scaled.

    Raises ImplementationError where a named implementation cannot run or take this case.
    """
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm go together: give both or neither")
    kv_scales = scales_for(blocks, kv_scales)
    run: Callable[..., Any] = rope_kv_write_xla
    if chosen_rope_kv_write(qkv, blocks, implementation) == "mosaic":
        from jaxrunner.pallas.rope_kv_write_mosaic import rope_kv_write_mosaic as run
    return run(qkv, blocks, layer, slot_mapping, rope, q_norm=q_norm, k_norm=k_norm, eps=eps, kv_scales=kv_scales)


def queries_of(qkv: Any, blocks: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of the queries in a projection, [T, H, D]."""
    num_tokens, heads, head_dim = qkv.shape
    return jax.ShapeDtypeStruct((num_tokens, heads - 2 * blocks.shape[4], head_dim), qkv.dtype)


def chosen_rope_kv_write(qkv: Any, blocks: Any, implementation: Implementation) -> str:
    """The implementation that `rope_kv_write` takes. Raises ImplementationError where a named one cannot."""
    from jaxrunner.pallas import rope_kv_write_mosaic

    return resolve("rope_kv_write", implementation, {"mosaic": rope_kv_write_mosaic.reason_against(qkv, blocks)})


def rope_kv_write_xla(qkv, blocks, layer, slot_mapping, rope, *, q_norm=None, k_norm=None, eps=1e-6, kv_scales=None):
    """See `rope_kv_write`; this composition is its specification."""
    num_kv_heads = blocks.shape[4]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(qkv, [num_heads, num_heads + num_kv_heads], axis=1)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    return q, kv_write_xla(blocks, layer, k, v, slot_mapping, kv_scales=kv_scales)
