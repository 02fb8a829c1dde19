"""The best ids of a row up to a limit, exactly and without sorting the vocabulary.

Order: the higher score first; equal scores by id, the lowest first. An id is kept if what stands before it in that
order, counted or weighed, is below the limit. The score at which the limit is reached is found two bits at a time:
scores are not positive, so their magnitude, read as an integer, ascends in this order, and each of 16 passes over the
row weighs what lies before the three next bounds at once. What a pass costs is reading the row, so three bounds cost
little more than one; with seven, the comparisons would cost more than the passes that they spare. Among the ids of
that very score their order decides. All sums are of integers, so they do not depend on the order of summation, hence
not on batch size or device.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

BITS, BITS_PER_PASS, CHUNK = 32, 2, 256


def best(
    scaled: Float32[Array, "B V"], weight: Int32[Array, "B V"] | None, limit: Int32[Array, "B"]
) -> Bool[Array, "B V"]:
    """Which ids have a weight of less than `limit` before them.

    scaled: at most 0. weight: not negative, equal for equal scores, each row's sum below 2^31; None counts each id
    once, without an array of ones that every pass would have to read. limit: at least 1, which keeps the best id; above
    the row's sum keeps all.
    """
    each = jnp.int32(1) if weight is None else weight
    magnitude = lax.bitcast_convert_type(jnp.abs(scaled), jnp.uint32)

    def before(*bounds: UInt32[Array, "B"]) -> tuple[Int32[Array, "B"], ...]:
        parts = tuple(jnp.where(magnitude < bound[:, None], each, 0) for bound in bounds)
        # One reduction of several operands reads the row once.
        return tuple(lax.reduce(parts, (jnp.int32(0),) * len(parts), _add, (1,)))

    def refine(step: Array, bound: UInt32[Array, "B"]) -> UInt32[Array, "B"]:
        shift = (BITS - BITS_PER_PASS * (step + 1)).astype(jnp.uint32)
        higher = [bound | (jnp.uint32(digit) << shift) for digit in range(1, 1 << BITS_PER_PASS)]
        for candidate, weighed in zip(higher, before(*higher), strict=True):
            bound = jnp.where(weighed < limit, candidate, bound)
        return bound

    bound = lax.fori_loop(0, BITS // BITS_PER_PASS, refine, jnp.zeros(limit.shape, jnp.uint32))
    is_tie = magnitude == bound[:, None]
    end = first_past(jnp.where(is_tie, each, 0), limit - before(bound)[0])
    return (magnitude < bound[:, None]) | (is_tie & (jnp.arange(scaled.shape[1]) < end[:, None]))


def first_past(weight: Int32[Array, "B V"], limit: Int32[Array, "B"]) -> Int32[Array, "B"]:
    """The first id of each row before which, by id, there is a weight of `limit` or more; V or more if there is none.

    weight: not negative. limit: at least 1. The row is read once, in chunks; only their sums and the one chunk in which
    the limit is reached are summed up by place.
    """
    rows, vocab_size = weight.shape
    chunks = jnp.pad(weight, ((0, 0), (0, -vocab_size % CHUNK))).reshape(rows, -1, CHUNK)
    sums = jnp.sum(chunks, axis=-1, dtype=jnp.int32)
    before = jnp.cumsum(sums, axis=-1, dtype=jnp.int32) - sums
    last = jnp.sum(before < limit[:, None], axis=-1, dtype=jnp.int32) - 1
    row = jnp.arange(rows)
    inside = chunks[row, last]
    reached = before[row, last][:, None] + jnp.cumsum(inside, axis=-1, dtype=jnp.int32) - inside
    return last * CHUNK + jnp.sum(reached < limit[:, None], axis=-1, dtype=jnp.int32)


def _add(left: tuple[Array, ...], right: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))
