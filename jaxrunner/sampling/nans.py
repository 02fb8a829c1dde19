"""NaN among logits: how many each request has."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def count_nans(logits: Float[Array, "B V"], is_live: Bool[Array, "B"]) -> Int32[Array, "B"]:
    """NaN in each row; 0 in rows of padding, which show the logits of somebody else's token."""
    return jnp.where(is_live, jnp.sum(jnp.isnan(logits), axis=1, dtype=jnp.int32), 0)
