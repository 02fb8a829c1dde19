"""Thinking budget: a request that has thought for so many tokens is made to end its thinking."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.sampling.history import History
from jaxrunner.state.sampling import ThinkingTokens

FORCED_LOGIT = 1e9
"""Above every other logit by so much that it is drawn at any temperature."""


def end_thinking(
    logits: Float32[Array, "B V"],
    history: History,
    position: Int32[Array, "B"],
    budget: Int32[Array, "B"],
    marks: ThinkingTokens,
) -> Float32[Array, "B V"]:
    """logits in which the next id of `marks.forced_end` is certain, in rows whose budget is spent.

    A row thinks if the last occurrence of marks.start lies behind the last one of marks.end, in prompt or output; it
    has used the tokens behind that start. The next id is the one after the longest part of forced_end with which the
    row's tokens end already. budget: tokens + 1, 0 for no bound. A forced id is taken even where it was forbidden.
    Source: vLLM V2, `thinking_budget`.
    """
    tokens = history.of_rows()
    start = last_occurrence(tokens, position, marks.start)
    end = last_occurrence(tokens, position, marks.end)
    used = position - (start + len(marks.start))
    is_spent = (budget > 0) & (start >= 0) & (start > end) & (used >= budget - 1)
    progress = jnp.zeros_like(position)
    for length in range(1, len(marks.forced_end)):
        index = position[:, None] - length + jnp.arange(length)
        ends_so = (index >= 0) & (history.at(index) == jnp.array(marks.forced_end[:length]))
        progress = jnp.where(ends_so.all(axis=1), length, progress)
    column = jnp.where(is_spent, jnp.array(marks.forced_end, jnp.int32)[progress], logits.shape[1])
    return logits.at[jnp.arange(logits.shape[0]), column].set(FORCED_LOGIT, mode="drop")


def last_occurrence(
    tokens: Int32[Array, "B L"], length: Int32[Array, "B"], sequence: tuple[int, ...]
) -> Int32[Array, "B"]:
    """Where `sequence` begins for the last time within the first `length` tokens of each row, -1 if nowhere."""
    width = tokens.shape[1]
    index = jnp.arange(width)
    found: Bool[Array, "B L"] = index + len(sequence) <= length[:, None]
    padded = jnp.pad(tokens, ((0, 0), (0, len(sequence))))
    for offset, token_id in enumerate(sequence):
        found &= padded[:, offset : offset + width] == token_id
    return jnp.max(jnp.where(found, index, -1), axis=1)
