"""top_p (nucleus): the fewest best ids that hold a mass of p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.sampling.threshold import best

MAX_LIMIT = jnp.iinfo(jnp.int32).max
UNIT_BITS, WORD = 24, 12
"""Bits of a ratio of 1 in the units of `mass_exponent`, and how many of them the low word has."""
MOST_IDS = 1 << 19
"""Masses of fewer ids do not overflow."""


def top_p(scaled: Float32[Array, "B V"], p: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """scaled with -inf for every id before which, in descending order, there is a mass of p or more.

    scaled: as an earlier filter leaves it, maximum 0; -inf has no mass. The best id is always kept; ids of equal
    probability stand lowest id first. p: 0 and 1 are off; where it is for all rows nothing is searched.
    Source: vLLM, `cumulative (ascending) <= 1 - p` is masked.
    """

    def search() -> Float32[Array, "B V"]:
        mass = integer_masses(jnp.exp(scaled))
        limit = mass_limit(p, jnp.sum(mass, axis=-1, dtype=jnp.int32))
        return jnp.where(best(scaled, mass, jnp.where(is_on(p), limit, MAX_LIMIT)), scaled, -jnp.inf)

    return lax.cond(is_on(p).any(), search, lambda: scaled)


def is_on(p: Float32[Array, "B"]) -> Bool[Array, "B"]:
    return (p > 0) & (p < 1)


def mass_limit(p: jax.Array, total: jax.Array) -> jax.Array:
    """The least whole mass that is p of the total or more, 1 at least; f32 and i32, scalars of a kernel too."""
    exact = p * total.astype(jnp.float32)
    whole = exact.astype(jnp.int32)
    return jnp.maximum(whole + (whole.astype(jnp.float32) < exact).astype(jnp.int32), 1)


def integer_masses(ratio: Float32[Array, "B V"]) -> Int32[Array, "B V"]:
    """ratio as integers that are proportional to it and sum to between 2^29 and 2^30 in each row, up to rounding.

    ratio: 0 to 1, with a 1 in each row. The scale is a power of two, found from sums of integers alone.
    """
    if (vocab_size := ratio.shape[1]) >= MOST_IDS:
        raise ValueError(f"top_p takes vocabularies of fewer than {MOST_IDS} ids, not {vocab_size}")
    units = scaled_mass(ratio, jnp.float32(1 << UNIT_BITS))
    high = jnp.sum(units >> WORD, axis=-1, dtype=jnp.int32)
    low = jnp.sum(units & ((1 << WORD) - 1), axis=-1, dtype=jnp.int32)
    return scaled_mass(ratio, power_of_two(mass_exponent(high, low, vocab_size))[:, None])


def mass_exponent(high: jax.Array, low: jax.Array, vocab_size: int) -> jax.Array:
    """i32 e such that ratios times 2^e sum to between 2^29 and 2^30, from the two words of their sum in units of
    2^-UNIT_BITS. Scalars of a kernel too."""
    # In units of the high word. Each id was rounded by half of a unit of the low one at most.
    bound = high + (low >> WORD) + (2 + (vocab_size >> (WORD + 1)))
    return UNIT_BITS - WORD + 30 - (32 - lax.clz(bound))


def power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def scaled_mass(ratio: jax.Array, power: jax.Array) -> jax.Array:
    return lax.round(ratio * power, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
