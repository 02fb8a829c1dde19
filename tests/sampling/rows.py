"""Sampling parameters as the device holds them, for tests: one row a `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.state.fields import REQUEST_FIELDS
from jaxrunner.state.records import masked_stop_ids, request_record
from jaxrunner.state.sampling import SamplingState

MAX_STOP_IDS = 4


def sampling_state(
    params: Sequence[SamplingParams],
    *,
    prompt_len: int = 1,
    eos: Sequence[int] = (),
    seeds: Sequence[int] | None = None,
) -> SamplingState:
    """The rows that admission would write."""
    records, stop_ids = [], np.zeros((len(params), MAX_STOP_IDS), np.int32)
    for row, request in enumerate(params):
        seed = row if seeds is None else int(seeds[row])
        record = request_record(
            prompt_len=prompt_len, prefill_len=prompt_len, num_computed_tokens=0, params=request, seed=seed
        )
        records.append(record[len(REQUEST_FIELDS) :])
        ids = masked_stop_ids(request, eos)
        stop_ids[row, : len(ids)] = np.array(ids, np.int32) + 1
    return SamplingState(jnp.asarray(np.stack(records)), jnp.asarray(stop_ids))
