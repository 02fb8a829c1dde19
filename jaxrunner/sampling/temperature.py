"""Temperature: the scores that the filters and the draw work on."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow (vLLM's `_SAMPLING_EPS`)."""


def scale(
    logits: Float32[Array, "B V"], temperature: Float32[Array, "B"], highest: Float32[Array, "B 1"] | None = None
) -> Float32[Array, "B V"]:
    """(logits - their maximum) / temperature: 0 for the best id, less for all others; greedy rows undivided.

    Subtracting first keeps a small temperature from overflowing to infinity. A damaged row (NaN or +inf in it, or all
    -inf) has no finite maximum and is only divided: see `is_sound`. highest: the maximum, if it is known.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True) if highest is None else highest
    return divide(logits - jnp.where(jnp.isfinite(highest), highest, 0.0), temperature)


def divide(logits: Float32[Array, "B V"], temperature: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """logits / temperature, greedy rows undivided: what `scale` gives, up to a number for each row."""
    return logits / jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]


def is_sound(scaled: Float32[Array, "B V"]) -> Array:
    """bool[B]: the row's maximum is 0. Filters leave other rows alone: the draw takes their first NaN, else their first
    +inf, else (all -inf) id 0."""
    return jnp.max(scaled, axis=-1) == 0
