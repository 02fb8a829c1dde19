"""Stage 3: the model runs once over the flat tokens and writes their keys and values into the paged cache."""

from __future__ import annotations

from typing import Any

import jax

from jaxrunner.compile.buckets import Bucket
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.stages.batch import StepBatch, attention_metadata
from jaxrunner.state.runner_state import RunnerState


def forward(
    model: Model,
    weights: Any,
    state: RunnerState,
    batch: StepBatch,
    *,
    bucket: Bucket,
    implementation: Implementation = None,
) -> tuple[RunnerState, jax.Array]:
    """(state with the new KV, hidden states [T, hidden] after the final norm, of the model's dtype).

    Hidden states of padding tokens are finite garbage that nobody reads.
    """
    query_len = bucket.query_len if bucket.kind == "decode" else None
    metadata = attention_metadata(batch, state.tables, query_len)
    blocks, hidden = transformer.forward(
        model,
        weights,
        state.kv.blocks,
        batch.input_ids,
        batch.positions,
        metadata,
        state.tables.group_of_layer,
        kv_scales=state.kv.scales,
        max_model_len=state.max_model_len,
        implementation=implementation,
    )
    return state.replace(kv=state.kv.replace(blocks=blocks)), hidden
