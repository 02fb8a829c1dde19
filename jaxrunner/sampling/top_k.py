"""top_k: the k best ids."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.threshold import best


def top_k(scaled: Float32[Array, "B V"], k: Int32[Array, "B"]) -> Float32[Array, "B V"]:
    """scaled with -inf for all but exactly k ids of a row; ids that tie at the k-th place are kept lowest first.

    scaled: as `temperature.scale` leaves it, at most 0. k: 0 or less, and the vocabulary's size or more, are off.
    Source: vLLM's kernel for 8 rows or more; its other path keeps all ties, so there the set depends on the batch.
    """
    vocab_size = scaled.shape[1]
    limit = jnp.where((k > 0) & (k < vocab_size), k, vocab_size)
    return jnp.where(best(scaled, None, limit), scaled, -jnp.inf)
