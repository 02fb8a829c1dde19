"""Copies of what exists in a row alone, taken before the row goes to another request."""

from __future__ import annotations

import jax
import numpy as np
from flax import struct

from jaxrunner.state.request_arrays import updated_names
from jaxrunner.state.runner_state import RunnerState


class RowCopies(struct.PyTreeNode):
    """Of n rows: values of updated arrays, name -> [n, GENERATIONS, *shape]; total_len, prefill_len: i32[n]."""

    values: dict[str, jax.Array]
    total_len: jax.Array | np.ndarray
    prefill_len: jax.Array | np.ndarray


def copy_rows(state: RunnerState, rows: jax.Array) -> tuple[RunnerState, RowCopies]:
    """(the state as it is, the copies). rows: i32[n]. The runner donates the state, as in all of its programs."""
    values = {name: state.extras[name][rows] for name in updated_names(state.sampling.custom)}
    return state, RowCopies(values, state.requests.total_len[rows], state.requests.prefill_len[rows])
