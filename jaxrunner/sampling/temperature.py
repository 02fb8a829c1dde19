"""Temperature: the scores that the filters and the draw work on."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow (vLLM's `_SAMPLING_EPS`)."""


class ScaledRows(NamedTuple):
    """What `scale` gives, for a kernel that reads logits and scales what it reads: f32(logits - offset) * inverse."""

    logits: Float[Array, "B V"]
    offset: Float32[Array, "B"]
    inverse: Float32[Array, "B"]


def scale(
    logits: Float32[Array, "B V"], temperature: Float32[Array, "B"], highest: Float32[Array, "B 1"] | None = None
) -> Float32[Array, "B V"]:
    """(logits - their maximum) / temperature: 0 for the best id, less for all others; greedy rows undivided.
    In two operations, (logits - `offset`) * `inverse`, so that a kernel comes to the same numbers.

    Subtracting first keeps a small temperature from overflowing to infinity. A damaged row (NaN or +inf in it, or all
    -inf) has no finite maximum and is only divided: see `is_sound`. highest: the maximum, if it is known.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True) if highest is None else highest
    return divide(logits - offset(highest), temperature)


def offset(highest: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """What `scale` subtracts from a row whose greatest logit this is."""
    return jnp.where(jnp.isfinite(highest), highest, 0.0)


def divide(logits: Float32[Array, "B V"], temperature: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """logits / temperature, greedy rows undivided: what `scale` gives, up to a number for each row."""
    return logits * inverse(temperature)[:, None]


def inverse(temperature: Float32[Array, "B"]) -> Float32[Array, "B"]:
    """What `divide` multiplies by: compilers for a GPU do not all divide alike, and none as fast."""
    return 1.0 / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)


def is_sound(scaled: Float32[Array, "B V"]) -> Array:
    """bool[B]: the row's maximum is 0. Filters leave other rows alone: the draw takes their first NaN, else their first
    +inf, else (all -inf) id 0."""
    return jnp.max(scaled, axis=-1) == 0
