"""Logits of given sequences, through both kinds of bucket: a chunk of each prompt, then its other tokens as decodes."""

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
from jaxrunner.pallas.implementation import Implementation

BLOCK_SIZE = 16


def teacher_forced(
    model: Model,
    weights: Any,
    sequences: Sequence[Sequence[int]],
    *,
    chunk: int,
    implementation: Implementation = None,
) -> list[np.ndarray]:
    """f32[len, vocab] of each sequence. All run in one batch: the first `chunk` tokens of each in one ragged step, the
    rest token by token in uniform decode steps; what the step samples is never fed back."""
    count, longest = len(sequences), max(map(len, sequences))
    blocks = 1 + sum(-(-(len(s) + 1) // BLOCK_SIZE) for s in sequences)
    state = jaxrunner.init_state(model, max_requests=count, max_model_len=longest + 1, num_blocks=blocks)
    state, rows = jaxrunner.admit(state, sequences)
    mixed, decode = Bucket("mixed", chunk * count, count, chunk), Bucket("decode", count, count)
    done, parts = [0] * count, [[] for _ in sequences]
    while left := [i for i in range(count) if done[i] < len(sequences[i])]:
        counts = {i: 1 if done[i] else min(chunk, len(sequences[i])) for i in left}
        bucket = mixed if not any(done) else decode
        inputs = jaxrunner.plan(state, {rows[i]: n for i, n in counts.items()})
        upload = jnp.asarray(inputs.pack(bucket))
        state, logits = _run(model, weights, state, upload, bucket=bucket, implementation=implementation)
        ends = np.cumsum([counts[i] for i in left])
        for i, end in zip(left, ends, strict=True):
            parts[i].append(np.asarray(logits[end - counts[i] : end]))
            done[i] += counts[i]
    return [np.concatenate(part) for part in parts]


@functools.partial(jax.jit, static_argnames=("model", "bucket", "implementation"), donate_argnames="state")
def _run(model, weights, state, upload, *, bucket, implementation):
    state, output = jaxrunner.step(
        model, weights, state, upload, bucket=bucket, return_hidden=True, implementation=implementation
    )
    return state, transformer.logits(model, weights, output.hidden)
