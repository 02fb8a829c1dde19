"""Stage 5: sampled tokens and progress enter the state; the host need not have seen them."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrunner.pallas.commit import commit_rows
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.request_arrays import with_updates
from jaxrunner.state.runner_state import RunnerState


def commit(
    state: RunnerState,
    requests: BatchRequests,
    sampled_token_ids: jax.Array,
    num_sampled: jax.Array,
    num_rejected: jax.Array | None = None,
    *,
    updates: Mapping[str, jax.Array] | None = None,
    implementation: Implementation = None,
) -> RunnerState:
    """The state after the step.

    sampled_token_ids: i32[B, K + 1]; the first num_sampled[b] of row b count. num_rejected: i32[B], scheduled drafts
    that were not accepted; their KV is stale and will be overwritten. updates: new values of the rows' arrays in
    `state.extras`, of requests that sampled; the others keep theirs.

    Per live request: num_computed += query_len - num_rejected; with a sample, total_len += num_sampled, the history
    is extended and last_sampled_token is the newest. Rows of padding write nothing: the parking row keeps its zeros.
    """
    num_computed = requests.query_lens if num_rejected is None else requests.query_lens - num_rejected
    counters, token_ids = commit_rows(
        state.requests.counters,
        state.requests.token_ids,
        requests.idx_mapping,
        num_computed,
        sampled_token_ids,
        num_sampled,
        implementation=implementation,
    )
    if updates:
        rows = jnp.where(num_sampled > 0, requests.idx_mapping, state.requests.num_rows)  # out of range: dropped
        num_tokens = state.requests.total_len[requests.idx_mapping] + num_sampled
        state = state.replace(extras=with_updates(state.extras, updates, rows, num_tokens))
    return state.replace(requests=state.requests.replace(counters=counters, token_ids=token_ids))
