"""Building blocks of a transformer layer, as plain functions over arrays."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxrunner.models.model import Model
from jaxrunner.models.rope import inv_freq
from jaxrunner.pallas.target import target


def rms_norm(x: Float[Array, "*batch H"], weight: Float[Array, "H"], eps: float) -> Float[Array, "*batch H"]:
    """x / rms(x) * weight over the last axis, computed in float32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def linear(
    x: Float[Array, "T I"], weight: Float[Array, "O I"], bias: Float[Array, "O"] | None = None
) -> Float[Array, "T O"]:
    """x @ weight.T + bias with the weight as checkpoints store it, [out, in].

    float32 is multiplied in full float32 on every device. One row of bfloat16 on the CPU is a multiply and a sum:
    XLA would otherwise widen the whole matrix to float32 first.
    """
    if x.shape[0] == 1 and weight.dtype == jnp.bfloat16 and target().platform == "cpu":
        out = jnp.sum(x.astype(jnp.float32) * weight.astype(jnp.float32), axis=-1)[None].astype(x.dtype)
    else:
        precision = "highest" if weight.dtype == jnp.float32 else None
        out = lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=precision)
    return out if bias is None else out + bias


def rotary_table(
    model: Model, positions: Int32[Array, "T"], max_model_len: int | None = None
) -> tuple[Float32[Array, "T F"], Float32[Array, "T F"]]:
    """(cos, sin) of each position, f32[T, head_dim / 2]. Computed, not looked up: no position is out of range.

    max_model_len: positions the run may use, which chooses the factors of longrope.
    """
    frequencies, factor = inv_freq(model.rope, model.head_dim, model.max_position_embeddings, max_model_len)
    angles = positions[:, None].astype(jnp.float32) * jnp.asarray(frequencies)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
    x: Float[Array, "T N D"], cos: Float32[Array, "T F"], sin: Float32[Array, "T F"]
) -> Float[Array, "T N D"]:
    """Rotate pairs (i, i + D/2) of each head (the NeoX order), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
