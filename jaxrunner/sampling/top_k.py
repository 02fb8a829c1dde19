"""top_k: the k best ids."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.threshold import best


def top_k(scaled: Float32[Array, "B V"], k: Int32[Array, "B"]) -> Float32[Array, "B V"]:
    """scaled with -inf for all but exactly k ids of a row; ids that tie at the k-th place are kept lowest first.

    scaled: as `temperature.scale` leaves it, at most 0. k: 0 or less, and the vocabulary's size or more, are off; where
    it is for all rows nothing is searched.
    Source: vLLM's kernel for 8 rows or more; its other path keeps all ties, so there the set depends on the batch.
    """
    limit = limit_of(k, scaled.shape[1])

    def search() -> Float32[Array, "B V"]:
        return jnp.where(best(scaled, None, limit), scaled, -jnp.inf)

    return lax.cond((limit < scaled.shape[1]).any(), search, lambda: scaled)


def limit_of(k: Int32[Array, "B"], vocab_size: int) -> Int32[Array, "B"]:
    """How many ids top_k leaves at most; the vocabulary's size where it is off."""
    return jnp.where((k > 0) & (k < vocab_size), k, vocab_size)
