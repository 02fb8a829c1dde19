"""Bad words: sequences of ids that the output never completes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.sampling.history import History


def mask_bad_words(
    logits: Float32[Array, "B V"],
    history: History,
    position: Int32[Array, "B"],
    word_ids: Int32[Array, "B W"],
    place: Int32[Array, "B W"],
) -> Float32[Array, "B V"]:
    """logits with -inf at the last id of every word whose other ids are the newest output; a word of one id always.

    The prompt does not count: a word must lie in the output as a whole. word_ids: id + 1 of the words' tokens, one
    word after the other, 0 where unused. place: see `ListSizes.columns`. An id outside the vocabulary masks nothing.
    Source: vLLM V2, whose prefixes are compared with output tokens alone.
    """
    rows, vocab_size = logits.shape
    if not word_ids.shape[1]:
        return logits
    is_before, is_last = (word_ids > 0) & (place > 0), (word_ids > 0) & (place <= 0)
    index = position[:, None] - place
    is_there = (index >= history.prompt_len[:, None]) & (history.at(index) + 1 == word_ids)
    missed = (is_before & ~is_there).astype(jnp.int32)
    so_far = jnp.cumsum(missed, axis=1, dtype=jnp.int32) - missed
    first = jnp.maximum(jnp.arange(word_ids.shape[1]) + place, 0)  # of a word, at its last token
    misses = so_far - jnp.take_along_axis(so_far, jnp.minimum(first, word_ids.shape[1] - 1), axis=1)
    column = jnp.where(is_last & (misses == 0), word_ids - 1, vocab_size)  # out of range: dropped
    return logits.at[jnp.arange(rows)[:, None], column].set(-jnp.inf, mode="drop")
