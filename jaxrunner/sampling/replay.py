"""Trace replay: the first tokens of a request's output are given, whatever was drawn."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def replayed(
    replay_ids: Int32[Array, "B N"], position: Int32[Array, "B"], prompt_len: Int32[Array, "B"]
) -> tuple[Bool[Array, "B"], Int32[Array, "B"]]:
    """(whether a row's token is given, the token).

    replay_ids: id + 1, 0 behind the end. position: index of the new token, which is number position - prompt_len of
    the output, also after a preemption. Source: vLLM, `trace_replay`.
    """
    count = replay_ids.shape[1]
    if not count:
        return jnp.zeros(position.shape, bool), jnp.zeros_like(position)
    number = position - prompt_len
    entry = jnp.take_along_axis(replay_ids, jnp.clip(number, 0, count - 1)[:, None], axis=1)[:, 0]
    return (number >= 0) & (number < count) & (entry > 0), entry - 1
