"""Log-probabilities (or logits) of chosen ids, of the best ids beside them, and of ids that a request names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Float32, Int32

from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.best_ids import best_ids
from jaxrunner.sampling.filters import chunk_maxima
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports


class TokenLogprobs(struct.PyTreeNode):
    """Of B rows. n: `Reports.num_best`, or the vocabulary if it is smaller.

    logprob_token_ids: i32[B, n + 1], the chosen id, then the n best (the chosen one again if it is among them).
    logprobs: f32[B, n + 1], of these ids. sampled_token_ranks: i32[B], of the chosen ids; the n best have 1..n.
    listed_ids, listed_logprobs: i32[B, M] and f32[B, M], ids that each row's request names, and their numbers; -1 and
    -inf where its list is shorter. every: f32[B, V], of all ids; None unless requests may ask for so many.
    """

    logprob_token_ids: jax.Array
    logprobs: jax.Array
    sampled_token_ranks: jax.Array
    listed_ids: jax.Array
    listed_logprobs: jax.Array
    every: jax.Array | None = None


def token_logprobs(
    logits: Float[Array, "B V"],
    chosen: Int32[Array, "B"],
    listed: Int32[Array, "B M"],
    reports: Reports = DEFAULT_REPORTS,
    *,
    maxima: Float32[Array, "B N"] | None = None,
    implementation: Implementation = None,
) -> TokenLogprobs:
    """What `reports` says, of these logits.

    logits: of any floating type, widened to float32. chosen: ids inside the vocabulary. listed: ids that a row names,
    as its state holds them: id + 1, 0 where unused. maxima: the logits' `chunk_maxima`, if they are known.
    implementation: of the search for the best ids.
    Equal best ids stand lowest first. A rank is the number of ids at least as probable, 1 at least. A row of -inf has
    only -inf, one with a NaN only NaN (in the modes of logits, where they are NaN).
    Source: vLLM's `gather_logprobs`.
    """
    given, logits, vocab_size = logits, logits.astype(jnp.float32), logits.shape[1]
    if maxima is None:
        maxima = chunk_maxima(logits, op="best_ids", implementation=implementation)
    best = best_ids(given, min(reports.num_best, vocab_size), maxima)
    ids = jnp.concatenate([chosen[:, None], best], axis=1)
    values = jnp.take_along_axis(logits, ids, axis=1, mode="clip")
    rank = jnp.sum(logits >= values[:, :1], axis=1, dtype=jnp.int32)
    named = jnp.clip(listed - 1, 0, vocab_size - 1)
    of_listed = jnp.take_along_axis(logits, named, axis=1, mode="clip")
    every = logits
    if not reports.is_logits:
        # Subtracted one after the other: their sum would be rounded to a float of the size of the largest logit.
        highest = jnp.where(jnp.isfinite(values[:, 1:2]), values[:, 1:2], 0.0)
        total = jnp.sum(jnp.exp(logits - highest), axis=1, keepdims=True)
        log_total = jnp.log(jnp.where(total == 0, 1.0, total))
        values, of_listed, every = (x - highest - log_total for x in (values, of_listed, every))
    return TokenLogprobs(
        logprob_token_ids=ids,
        logprobs=values,
        sampled_token_ranks=jnp.maximum(rank, 1),
        listed_ids=listed - 1,
        listed_logprobs=jnp.where(listed > 0, of_listed, -jnp.inf),
        every=every if reports.has_all_ids else None,
    )
