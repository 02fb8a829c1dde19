"""logit_bias: numbers added to the logits of some ids."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def add_bias(
    logits: Float32[Array, "B V"], bias_ids: Int32[Array, "B N"], bias: Float32[Array, "B N"]
) -> Float32[Array, "B V"]:
    """logits with `bias` added at its ids. A forbidden id (-inf) stays forbidden.

    bias_ids: id + 1, 0 where unused; distinct within a row. An id outside the vocabulary changes nothing.
    """
    rows, vocab_size = logits.shape
    column = jnp.where(bias_ids > 0, bias_ids - 1, vocab_size)  # out of range: dropped, where -1 would wrap
    return logits.at[jnp.arange(rows)[:, None], column].add(bias, mode="drop")
