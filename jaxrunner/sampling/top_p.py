"""top_p (nucleus): the fewest best ids that hold a mass of p."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.threshold import best

MAX_LIMIT = jnp.iinfo(jnp.int32).max


def top_p(scaled: Float32[Array, "B V"], p: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """scaled with -inf for every id before which, in descending order, there is a mass of p or more.

    scaled: as an earlier filter leaves it, maximum 0; -inf has no mass. The best id is always kept; ids of equal
    probability stand lowest id first. p: 0 and 1 are off. Source: vLLM, `cumulative (ascending) <= 1 - p` is masked.
    """
    mass = integer_masses(jnp.exp(scaled))
    total = jnp.sum(mass, axis=-1, dtype=jnp.int32)
    limit = jnp.maximum(jnp.ceil(p * total.astype(jnp.float32)), 1).astype(jnp.int32)
    is_on = (p > 0) & (p < 1)
    return jnp.where(best(scaled, mass, jnp.where(is_on, limit, MAX_LIMIT)), scaled, -jnp.inf)


def integer_masses(ratio: Float32[Array, "B V"]) -> Int32[Array, "B V"]:
    """ratio as integers that are proportional to it and sum to about 2^29 in each row, at most 2^30.

    ratio: 0 to 1, with a 1 in each row. The scale is a power of two, found from sums of integers alone: the first is
    coarse and only bounds the total, the second bounds it within a few per cent.
    """
    vocab_size = ratio.shape[1]
    exponent = jnp.full(ratio.shape[:1], 30 - vocab_size.bit_length(), jnp.int32)
    for _ in range(2):
        # The rounding of an id is off by half a unit at most: adding V gives more than the true sum.
        bound = jnp.sum(_scaled(ratio, exponent), axis=-1, dtype=jnp.int32) + vocab_size
        exponent += 29 - (31 - lax.clz(bound))
    return _scaled(ratio, exponent)


def _scaled(ratio: Float32[Array, "B V"], exponent: Int32[Array, "B"]) -> Int32[Array, "B V"]:
    power = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)  # 2^exponent, exact
    return jnp.round(ratio * power[:, None]).astype(jnp.int32)
