"""allowed_token_ids: all but some ids are out of reach."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def keep_allowed(logits: Float32[Array, "B V"], allowed_ids: Int32[Array, "B A"]) -> Float32[Array, "B V"]:
    """logits with -inf at all ids but the allowed ones, in rows that have some.

    allowed_ids: id + 1, 0 where unused. An id outside the vocabulary allows nothing, in this row or another.
    The few allowed logits are put aside and back, so that no table of the vocabulary's width is made.
    """
    rows, vocab_size = logits.shape
    is_id = allowed_ids > 0
    column = jnp.where(is_id, allowed_ids - 1, vocab_size)  # out of range: dropped, where -1 would wrap
    row = jnp.arange(rows)[:, None]
    kept = logits.at[row, column].get(mode="fill", fill_value=-jnp.inf)
    emptied = jnp.where(is_id.any(axis=1, keepdims=True), -jnp.inf, logits)
    return emptied.at[row, column].set(kept, mode="drop")
