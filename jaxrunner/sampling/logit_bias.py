"""logit_bias: numbers added to the logits of some ids."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.penalties import Penalties


def add_bias(
    penalised: Float32[Array, "B V"],
    logits: Float32[Array, "B V"],
    penalties: Penalties,
    bias_ids: Int32[Array, "B N"],
    bias: Float32[Array, "B N"],
) -> Float32[Array, "B V"]:
    """penalised, with its few ids that have a `bias` penalised anew, the bias added to their logits before.

    penalised: of logits; a forbidden id (-inf) stays forbidden. bias_ids: id + 1, 0 where unused; distinct within a
    row. An id outside the vocabulary changes nothing.
    """
    rows, vocab_size = logits.shape
    column = jnp.where(bias_ids > 0, bias_ids - 1, vocab_size)  # out of range: dropped, where -1 would wrap
    found, before = (jnp.take_along_axis(x, column, axis=1, mode="clip") for x in (penalised, logits))
    biased = jnp.where(found == -jnp.inf, found, penalties.apply_at(before + bias, column))
    return penalised.at[jnp.arange(rows)[:, None], column].set(biased, mode="drop")
