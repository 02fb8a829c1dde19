"""The judgement of an attention: its result on a spec against the float64 oracle, row by row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.checks.attention_specs import AttentionSpec
from jaxrunner.pallas.attention_metadata import AttentionMetadata

TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3, "float32": 1e-5}
"""Relative to the norm of a row of the result: of rounding probabilities and the result to the type."""
SMALLEST_NORM = 0.05
"""A row of a smaller norm is judged as if it had this one."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """error: the largest of any row, relative to the row's norm; None where there is no result to measure.

    reason: what is wrong, or None.
    """

    spec: AttentionSpec
    error: float | None
    reason: str | None

    @property
    def passed(self) -> bool:
        return self.reason is None


def metadata_of(spec: AttentionSpec, arrays: dict[str, Any]) -> AttentionMetadata:
    """As a step of this batch would have it; no slot is written."""
    return AttentionMetadata(
        query_start_loc=jnp.asarray(arrays["query_start_loc"]),
        seq_lens=jnp.asarray(arrays["seq_lens"]),
        num_reqs=jnp.int32(len(spec.query_lens)),
        block_table=jnp.asarray(arrays["block_table"]),
        slot_mapping=jnp.full(spec.tokens, -1, jnp.int32),
        query_len=spec.query_len,
    )


def run(spec: AttentionSpec, arrays: dict[str, Any], attend: Callable[..., Any]) -> np.ndarray:
    """The result of `attend` inside a jit, as the model calls it, with the spec's options."""
    call = jax.jit(functools.partial(attend, **spec.options))
    scales = {} if arrays["kv_scales"] is None else {"kv_scales": jnp.asarray(arrays["kv_scales"])}
    sinks = None if arrays["sinks"] is None else jnp.asarray(arrays["sinks"])
    args = (jnp.asarray(arrays["q"]), jnp.asarray(arrays["blocks"]), jnp.int32(spec.layer), metadata_of(spec, arrays))
    return np.asarray(jax.block_until_ready(call(*args, sinks=sinks, **scales)))


def compare(spec: AttentionSpec, arrays: dict[str, Any], result: np.ndarray) -> Verdict:
    """Close to the oracle row by row, and exactly zero in rows without keys and behind the last live token."""
    verdict = functools.partial(Verdict, spec, None)
    if result.shape != arrays["q"].shape:
        return verdict(f"the result has shape {result.shape}, not that of q, {arrays['q'].shape}")
    if result.dtype != arrays["q"].dtype:
        return verdict(f"the result has type {result.dtype}, not that of q, {arrays['q'].dtype}")
    expected, live = spec.expected(arrays), sum(spec.query_lens)
    result = result.astype(np.float64)
    if not np.isfinite(result).all():
        token, head = np.argwhere(~np.isfinite(result))[0][:2]
        where = f"token {token}, head {head}" if token < live else f"token {token}, which is padding"
        return verdict(f"NaN or infinity in the result, first at {where}: something read what no query sees")
    norms = np.linalg.norm(expected, axis=-1)
    errors = np.linalg.norm(result - expected, axis=-1) / np.maximum(norms, SMALLEST_NORM)
    verdict, limit = functools.partial(Verdict, spec, float(errors.max())), TOLERANCE[spec.dtype]
    if (result[live:] != 0).any():
        return verdict("rows behind the last live token are not zero")
    if (result[norms == 0] != 0).any():
        return verdict("a row without keys is not zero")
    if errors.max() > limit:
        token, head = np.unravel_index(errors.argmax(), errors.shape)
        return verdict(f"token {token}, head {head} is off by more than {limit:g} of its norm")
    return verdict(None)


def judge(attend: Callable[..., Any], spec: AttentionSpec, *, seed: int = 0) -> Verdict:
    """Build the spec's arrays, run `attend` on them, compare. What it raises is its verdict's reason."""
    arrays = spec.build(seed)
    try:
        result = run(spec, arrays, attend)
    except Exception as error:  # of a user's code, hence of any kind
        text = " ".join(str(error).split())
        return Verdict(spec, None, f"it raised {type(error).__name__}: {text[:300]}")
    return compare(spec, arrays, result)
