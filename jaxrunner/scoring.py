"""`score`: the logits of every position of given sequences, by running the step itself over them in chunks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.compile.buckets import Bucket
from jaxrunner.errors import AdmissionError
from jaxrunner.manual import admit, plan, release
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.stages.step import step
from jaxrunner.state.records import check_token_ids
from jaxrunner.state.runner_state import RunnerState, init_state

DEFAULT_CHUNK = 128
BLOCK_SIZE = 16


def score(
    model: Model,
    weights: Any,
    sequences: Sequence[Sequence[int]],
    *,
    chunk: int = DEFAULT_CHUNK,
    max_model_len: int | None = None,
    kv_cache_dtype: str | None = None,
) -> list[np.ndarray]:
    """f32[L, vocab] for each sequence of L token ids: row i holds the logits of the token after position i.

    model, weights: from `load`. chunk: tokens in one step; it bounds what the device holds besides the KV cache of the
    longest sequence. max_model_len: longest sequence allowed, the model's own limit by default. kv_cache_dtype: see
    `init_state`.

    All sequences run through the paged cache, one after the other, in one compiled bucket. Ids without a token (a
    padded vocabulary) have the logit -inf. Raises AdmissionError before anything runs if a sequence is empty, too long
    or holds an id outside the vocabulary.
    """
    if chunk < 1:
        raise AdmissionError(f"chunk is {chunk}; it must be at least 1")
    limit = model.max_position_embeddings if max_model_len is None else max_model_len
    if not 1 <= limit <= model.max_position_embeddings:
        raise AdmissionError(f"max_model_len is {limit}; this model's positions are 1..{model.max_position_embeddings}")
    checked = [check_token_ids(s, model.vocab_size, f"sequence {i}") for i, s in enumerate(sequences)]
    for i, ids in enumerate(checked):
        if len(ids) > limit:
            raise AdmissionError(f"sequence {i} has {len(ids)} tokens; at most {limit} are allowed")
    if not checked:
        return []
    longest = max(len(ids) for ids in checked)
    size = min(chunk, -(-longest // BLOCK_SIZE) * BLOCK_SIZE)
    state = _state_for(model, longest, kv_cache_dtype)
    scores = []
    for ids in checked:
        state, logits = _score_one(model, weights, state, ids.tolist(), Bucket("mixed", size, 1, size))
        scores.append(logits)
    return scores


def _state_for(model: Model, longest: int, kv_cache_dtype: str | None) -> RunnerState:
    """A state for one sequence. It has room for the token that the last chunk samples, which is never run."""
    roomy = model.replace(max_position_embeddings=model.max_position_embeddings + 1)
    blocks = -(-(longest + 1) // BLOCK_SIZE) + 1
    return init_state(
        roomy,
        max_requests=1,
        max_model_len=longest + 1,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=kv_cache_dtype,
    )


def _score_one(
    model: Model, weights: Any, state: RunnerState, ids: list[int], bucket: Bucket
) -> tuple[RunnerState, np.ndarray]:
    """(the state, empty again, the logits of one sequence)."""
    scores = np.empty((len(ids), model.vocab_size), np.float32)
    state, (row,) = admit(state, [ids])
    for start in range(0, len(ids), bucket.num_tokens):
        count = min(bucket.num_tokens, len(ids) - start)
        upload = jnp.asarray(plan(state, {row: count}).pack(bucket))
        state, logits = _step_with_logits(model, weights, state, upload, bucket=bucket)
        scores[start : start + count] = np.asarray(logits)[:count]
    return release(state, [row]), scores


@functools.partial(jax.jit, static_argnames=("model", "bucket"), donate_argnames="state")
def _step_with_logits(
    model: Model, weights: Any, state: RunnerState, upload: jax.Array, *, bucket: Bucket
) -> tuple[RunnerState, jax.Array]:
    state, output = step(model, weights, state, upload, bucket=bucket, return_hidden=True)
    assert output.hidden is not None
    return state, transformer.logits(model, weights, output.hidden)
