"""min_tokens: until a request has so many tokens of output, no id that ends it can be sampled."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


def mask_stop_ids(
    logits: Float32[Array, "B V"],
    stop_ids: Int32[Array, "B S"],
    min_len: Int32[Array, "B"],
    position: Int32[Array, "B"],
) -> Float32[Array, "B V"]:
    """logits with -inf at the stop ids of every row whose new token would come too early.

    stop_ids: id + 1, 0 where unused. min_len: prompt_len + min_tokens, 0 for no bound. position: index the new token
    will have in its request. An id outside the vocabulary masks nothing, in this row or another.
    """
    vocab_size = logits.shape[1]
    is_id = (stop_ids > 0) & (position < min_len)[:, None]
    column = jnp.where(is_id, stop_ids - 1, vocab_size)  # out of range: dropped, where -1 would wrap
    row = jnp.arange(logits.shape[0])[:, None]
    return logits.at[row, column].set(-jnp.inf, mode="drop")
