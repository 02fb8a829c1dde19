"""Log-probabilities of sampled tokens and of the best ids beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float32, Int32

MAX_LOGPROBS = 20
"""Most best ids that a request may ask for, and as many as the "logprobs" tier always returns."""


class TokenLogprobs(struct.PyTreeNode):
    """logprob_token_ids: i32[B, n + 1], the sampled id, then the n best (the sampled one again if it is among them).

    logprobs: f32[B, n + 1], of these ids. sampled_token_ranks: i32[B]; the n best have the ranks 1..n.
    """

    logprob_token_ids: jax.Array
    logprobs: jax.Array
    sampled_token_ranks: jax.Array


def token_logprobs(
    logits: Float32[Array, "B V"], sampled: Int32[Array, "B"], *, num_best: int = MAX_LOGPROBS
) -> TokenLogprobs:
    """Natural logarithms of the softmax of the model's own logits, before any parameter of the request.

    sampled: ids inside the vocabulary. num_best: n, cut to the vocabulary. Equal best ids stand lowest first. A rank is
    the number of ids at least as probable, 1 at least. A row of -inf has only -inf.
    Source: vLLM's `raw_logprobs` and `gather_logprobs`.
    """
    highest = jnp.max(logits, axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(highest), highest, 0.0)
    total = jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True)
    log_total = jnp.log(jnp.where(total > 0, total, 1.0))
    best, best_ids = lax.top_k(shifted, min(num_best, logits.shape[1]))
    chosen = jnp.take_along_axis(shifted, sampled[:, None], axis=1)
    rank = jnp.sum(shifted >= chosen, axis=-1, dtype=jnp.int32)
    return TokenLogprobs(
        logprob_token_ids=jnp.concatenate([sampled[:, None], best_ids.astype(jnp.int32)], axis=1),
        logprobs=jnp.concatenate([chosen, best], axis=1) - log_total,
        sampled_token_ranks=jnp.maximum(rank, 1),
    )
