"""Stage 1: the step's differences enter the state. Only blocks: everything else of a row changes on the device."""

from __future__ import annotations

import jax

from jaxrunner.compile.buckets import Bucket
from jaxrunner.stages.inputs import step_layout
from jaxrunner.state.block_writes import apply_block_writes
from jaxrunner.state.runner_state import RunnerState


def apply_diffs(state: RunnerState, packed: jax.Array, *, bucket: Bucket) -> RunnerState:
    """`state` with the staged block-table writes of `packed` (the i32 vector of `StepInput.pack`).

    Writing the same differences twice gives the same state.
    """
    part = step_layout(bucket, state.tables.groups, state.num_draft_tokens).unpack(packed)
    tables = apply_block_writes(state.tables, part["block_writes"], part["num_block_writes"])
    return state.replace(tables=tables)
