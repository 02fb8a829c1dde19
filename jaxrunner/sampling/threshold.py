"""The best ids of a row up to a limit, exactly and without sorting the vocabulary.

Order: the higher score first; equal scores by id, the lowest first. An id is kept if what stands before it in that
order, counted or weighed, is below the limit. The score at which the limit is reached is found bit by bit: scores are
not positive, so their magnitude, read as an integer, ascends in this order, and 31 passes over the row give the
largest magnitude before which there is less than the limit. Among the ids of that very score a prefix sum decides.
All sums are of integers, so they do not depend on the order of summation, hence not on batch size or device.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

MAGNITUDE_BITS = 31


def best(scaled: Float32[Array, "B V"], weight: Int32[Array, "B V"], limit: Int32[Array, "B"]) -> Bool[Array, "B V"]:
    """Which ids have a weight of less than `limit` before them.

    scaled: at most 0. weight: not negative, equal for equal scores, each row's sum below 2^31. limit: at least 1, which
    keeps the best id; above the row's sum keeps all.
    """
    magnitude = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)

    def before(bound: Int32[Array, "B"]) -> Int32[Array, "B"]:
        return jnp.sum(jnp.where(magnitude < bound[:, None], weight, 0), axis=-1, dtype=jnp.int32)

    def refine(step: Array, bound: Int32[Array, "B"]) -> Int32[Array, "B"]:
        higher = bound | (jnp.int32(1) << (MAGNITUDE_BITS - 1 - step))
        return jnp.where(before(higher) < limit, higher, bound)

    bound = lax.fori_loop(0, MAGNITUDE_BITS, refine, jnp.zeros_like(limit))
    is_tie = magnitude == bound[:, None]
    tied = jnp.where(is_tie, weight, 0)
    before_tie = before(bound)[:, None] + jnp.cumsum(tied, axis=-1, dtype=jnp.int32) - tied
    return (magnitude < bound[:, None]) | (is_tie & (before_tie < limit[:, None]))
