"""Is a timed step right? Logits of given tokens in its bucket: the automatic choice of kernels against XLA.

Random weights say nothing by what they answer, but both implementations must answer the same: the widths, the bucket,
the context and the choice of kernels are those of the timed step, over its first LAYERS layers. A decode runs its last
token over random keys and values, a prefill whole prompts; `error` is ||kernels - xla|| / ||xla|| of each row of
logits. Both sides round to bfloat16 in the same places, so that LIMIT is some roundings; a wrong key, mask or block
puts a row far beyond it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxrunner
from jaxrunner import Bucket
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.state.fields import REQUEST_COLUMN
from jaxrunner.state.runner_state import RunnerState

LAYERS = 2
LIMIT = 0.03
EVERY = 64
"""Of a prefill the logits of every 64th position are compared, and the last."""


def shallow(model: Model, weights: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
    """The model's first LAYERS layers, with the very weights."""
    return model.replace(layers=model.layers[:LAYERS]), weights | {"layers": weights["layers"][:LAYERS]}


def check_decode(model: Model, weights: Any, batch: int, context: int) -> dict[str, Any]:
    """One decode step of `batch` requests whose last token has `context` keys before it."""
    model, weights = shallow(model, weights)
    prompts = random_prompts(model, (context + 1,) * batch)
    bucket = Bucket("decode", batch, batch)
    return _compare(model, weights, prompts, bucket, computed=context)


def check_prefill(model: Model, weights: Any, lengths: Sequence[int], max_reqs: int) -> dict[str, Any]:
    """One ragged step that runs whole prompts."""
    model, weights = shallow(model, weights)
    total = sum(lengths)
    return _compare(model, weights, random_prompts(model, lengths), Bucket("mixed", total, max_reqs, total), computed=0)


def random_prompts(model: Model, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]


def computed_state(model: Model, prompts: list[list[int]], computed: int, *, room: int = 1) -> tuple[RunnerState, list]:
    """(state, rows) with the prompts admitted, `computed` tokens of each taken as done over random keys and values.

    room: further tokens that each request may make."""
    blocks = 1 + sum(-(-(len(p) + room) // 16) for p in prompts)
    longest = max(map(len, prompts)) + room
    state = jaxrunner.init_state(model, max_requests=len(prompts), max_model_len=longest, num_blocks=blocks)
    state, rows = jaxrunner.admit(state, prompts)
    if computed:
        column = REQUEST_COLUMN["num_computed_tokens"]
        counters = state.requests.counters.at[jnp.array(rows), column].set(computed)
        state = state.replace(requests=state.requests.replace(counters=counters))
        state = state.replace(kv=state.kv.replace(blocks=tuple(map(_random_like, state.kv.blocks))))
    return state, rows


@functools.partial(jax.jit, donate_argnums=0)
def _random_like(blocks: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.key(3), blocks.shape, blocks.dtype)


def _compare(model: Model, weights: Any, prompts: list, bucket: Bucket, computed: int) -> dict[str, Any]:
    results = []
    for implementation in (None, "xla"):
        state, rows = computed_state(model, prompts, computed)
        inputs = jaxrunner.plan(state, {row: len(p) - computed for row, p in zip(rows, prompts, strict=True)})
        upload = jnp.asarray(inputs.pack(bucket))
        logits = _logits(model, weights, state, upload, bucket=bucket, implementation=implementation)
        results.append(np.asarray(logits))
    kernels, xla = results
    assert np.isfinite(xla).all()
    errors = np.linalg.norm(kernels - xla, axis=-1) / np.linalg.norm(xla, axis=-1)
    worst = float(errors.max())
    return {
        "rows": len(errors),
        "error": round(float(np.sqrt((errors**2).mean())), 5),
        "worst": round(worst, 5),
        "pass": worst < LIMIT,  # also false for NaN
    }


@functools.partial(jax.jit, static_argnames=("model", "bucket", "implementation"))
def _logits(model, weights, state, upload, *, bucket, implementation):
    _, output = jaxrunner.step(
        model, weights, state, upload, bucket=bucket, return_hidden=True, implementation=implementation
    )
    hidden = output.hidden
    if bucket.kind == "mixed":
        hidden = jnp.concatenate([hidden[::EVERY], hidden[-1:]])
    return transformer.logits(model, weights, hidden)
