"""allowed_token_ids: all but some ids are out of reach."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.penalties import Penalties


def keep_allowed(
    penalised: Float32[Array, "B V"],
    logits: Float32[Array, "B V"],
    penalties: Penalties,
    allowed_ids: Int32[Array, "B A"],
) -> Float32[Array, "B V"]:
    """penalised with -inf at all ids but the allowed ones, in rows that have some.

    penalised: of logits. allowed_ids: id + 1, 0 where unused. An id outside the vocabulary allows nothing, in this row
    or another. The few allowed ones are computed once more and put back, so that no table of the vocabulary's width is
    made, and penalties and this are one pass.
    """
    rows, vocab_size = logits.shape
    is_id = allowed_ids > 0
    column = jnp.where(is_id, allowed_ids - 1, vocab_size)  # out of range: dropped, where -1 would wrap
    kept = penalties.apply_at(jnp.take_along_axis(logits, column, axis=1, mode="clip"), column)
    emptied = jnp.where(is_id.any(axis=1, keepdims=True), -jnp.inf, penalised)
    return emptied.at[jnp.arange(rows)[:, None], column].set(kept, mode="drop")
