"""Commit: what a step sampled, and how far it got, enters the rows of its requests, in place when they are donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.state.fields import LAST_SAMPLED, NUM_COMPUTED, TOTAL_LEN
from jaxrunner.state.requests import PARKING_ROW


def commit_rows(
    counters: Int32[Array, "R F"],
    token_ids: Int32[Array, "R L"],
    rows: Int32[Array, "B"],
    num_computed: Int32[Array, "B"],
    sampled_token_ids: Int32[Array, "B S"],
    num_sampled: Int32[Array, "B"],
    *,
    implementation: Implementation = None,
) -> tuple[Int32[Array, "R F"], Int32[Array, "R L"]]:
    """(counters, token_ids) after a step.

    counters, token_ids: of `RequestState`. rows: of each request of the batch, distinct; PARKING_ROW where it is
    padding, which changes nothing. num_computed: tokens that were computed. sampled_token_ids: the first
    num_sampled[b] of row b count: they extend the history from total_len on (what does not fit is dropped), total_len
    grows by as many, and the last of them becomes last_sampled_token.

    Raises ImplementationError where a named implementation cannot run.
    """
    run: Callable[..., Any] = commit_rows_xla
    if resolve("commit", implementation) == "mosaic":
        from jaxrunner.pallas.commit_mosaic import commit_rows_mosaic as run
    return run(counters, token_ids, rows, num_computed, sampled_token_ids, num_sampled)


def commit_rows_xla(counters, token_ids, rows, num_computed, sampled_token_ids, num_sampled):
    """See `commit_rows`; this is its specification. Rows of padding are sent out of range and dropped."""
    out_of_range = counters.shape[0]
    row = jnp.where(rows != PARKING_ROW, rows, out_of_range)
    total_len = counters[rows, TOTAL_LEN]

    counters = counters.at[row, NUM_COMPUTED].add(num_computed, mode="drop")
    counters = counters.at[row, TOTAL_LEN].add(num_sampled, mode="drop")
    newest = jnp.take_along_axis(sampled_token_ids, jnp.maximum(num_sampled - 1, 0)[:, None], axis=1)[:, 0]
    sampled_row = jnp.where(num_sampled > 0, row, out_of_range)
    counters = counters.at[sampled_row, LAST_SAMPLED].set(newest, mode="drop")

    entry = jnp.arange(sampled_token_ids.shape[1])[None, :]
    history_row = jnp.where(entry < num_sampled[:, None], row[:, None], out_of_range)
    token_ids = token_ids.at[history_row, total_len[:, None] + entry].set(sampled_token_ids, mode="drop")
    return counters, token_ids
