"""Stage 2: the flat arrays of the step, gathered on the device from the persistent rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrunner.compile.buckets import Bucket
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.pallas.input_prep import input_prep
from jaxrunner.stages.apply_diffs import apply_diffs
from jaxrunner.stages.batch import StepBatch
from jaxrunner.stages.inputs import StepInput, step_layout
from jaxrunner.state.fields import PREFILL_LEN
from jaxrunner.state.requests import PARKING_ROW
from jaxrunner.state.runner_state import RunnerState


def prepare_inputs(
    state: RunnerState, inputs: StepInput | jax.Array, *, bucket: Bucket, implementation: Implementation = None
) -> StepBatch:
    """The batch that `step` would run for the same arguments, for looking at.

    It applies the step's block-table differences to a copy of the tables first; `state` is not changed or donated.
    """
    packed = inputs.pack(bucket) if isinstance(inputs, StepInput) else inputs
    packed = jnp.asarray(packed)
    state = apply_diffs(state, packed, bucket=bucket)
    return build_batch(state, packed, bucket=bucket, implementation=implementation)


def build_batch(
    state: RunnerState, packed: jax.Array, *, bucket: Bucket, implementation: Implementation = None
) -> StepBatch:
    """The batch of a step whose differences `state` already holds.

    packed: i32 vector of `StepInput.pack(bucket)`. Padding of the result is neutral whatever `packed` holds past
    `num_reqs`: rows -> parking row, query_start_loc tail = live tokens, seq_lens 0, ids and positions 0, slots -1.
    """
    part = step_layout(bucket, state.tables.groups, state.num_draft_tokens).unpack(packed)
    num_reqs, starts = part["num_reqs"], part["query_start_loc"]
    live = jnp.arange(bucket.num_reqs) < num_reqs
    rows = jnp.where(live, part["idx_mapping"], PARKING_ROW)
    drafts = part.get("num_draft_tokens")
    prep = input_prep(
        part["idx_mapping"],
        starts,
        num_reqs,
        state.requests.counters,
        state.requests.token_ids,
        state.tables.block_table,
        state.tables.num_blocks,
        state.requests.draft_tokens,
        drafts,
        num_tokens=bucket.num_tokens,
        block_sizes=tuple(g.block_size for g in state.tables.groups),
        implementation=implementation,
    )
    return StepBatch(
        num_reqs=num_reqs,
        idx_mapping=rows,
        query_start_loc=jnp.where(jnp.arange(starts.shape[0]) <= num_reqs, starts, starts[num_reqs]),
        seq_lens=prep.seq_lens,
        prefill_len=jnp.where(live, state.requests.counters[rows, PREFILL_LEN], 0),
        num_draft_tokens=jnp.where(live, drafts, 0) if drafts is not None else jnp.zeros_like(rows),
        positions=prep.positions,
        input_ids=prep.input_ids,
        logits_indices=prep.logits_indices,
        block_table=prep.block_table,
        slot_mapping=prep.slot_mapping,
    )
