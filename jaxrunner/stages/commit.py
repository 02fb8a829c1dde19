"""Stage 5: sampled tokens and progress enter the state; the host need not have seen them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.fields import REQUEST_COLUMN
from jaxrunner.state.runner_state import RunnerState

TOTAL_LEN = REQUEST_COLUMN["total_len"]
NUM_COMPUTED = REQUEST_COLUMN["num_computed_tokens"]
LAST_SAMPLED = REQUEST_COLUMN["last_sampled_token"]


def commit(
    state: RunnerState,
    requests: BatchRequests,
    sampled_token_ids: jax.Array,
    num_sampled: jax.Array,
    num_rejected: jax.Array | None = None,
) -> RunnerState:
    """The state after the step.

    sampled_token_ids: i32[B, K + 1]; the first num_sampled[b] of row b count. num_rejected: i32[B], scheduled drafts
    that were not accepted; their KV is stale and will be overwritten.

    Per live request: num_computed += query_len - num_rejected; with a sample, total_len += num_sampled, the history
    is extended and last_sampled_token is the newest. Rows of padding are sent out of range and dropped, so the
    parking row keeps its zeros.
    """
    out_of_range = state.requests.num_rows
    rejected = jnp.zeros_like(num_sampled) if num_rejected is None else num_rejected
    row = jnp.where(requests.live, requests.idx_mapping, out_of_range)
    counters = state.requests.counters
    total_len = counters[requests.idx_mapping, TOTAL_LEN]

    counters = counters.at[row, NUM_COMPUTED].add(requests.query_lens - rejected, mode="drop")
    counters = counters.at[row, TOTAL_LEN].add(num_sampled, mode="drop")
    newest = jnp.take_along_axis(sampled_token_ids, jnp.maximum(num_sampled - 1, 0)[:, None], axis=1)[:, 0]
    sampled_row = jnp.where(num_sampled > 0, row, out_of_range)
    counters = counters.at[sampled_row, LAST_SAMPLED].set(newest, mode="drop")

    entry = jnp.arange(sampled_token_ids.shape[1])[None, :]
    history_row = jnp.where(entry < num_sampled[:, None], row[:, None], out_of_range)
    token_ids = state.requests.token_ids.at[history_row, total_len[:, None] + entry].set(sampled_token_ids, mode="drop")
    return state.replace(requests=state.requests.replace(counters=counters, token_ids=token_ids))
