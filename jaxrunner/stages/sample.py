"""Stage 4: logits of the rows that need them, and one token for each request whose prefill is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Tier, covers
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.runner_state import RunnerState

NO_TOKEN = -1
LogitsFn = Callable[[jax.Array, BatchRequests], jax.Array]


class StepOutput(struct.PyTreeNode):
    """sampled_token_ids: i32[B, K + 1], -1 where nothing was sampled. num_sampled: i32[B].

    logprobs: of the "logprobs" tier, None in the others; junk in rows where nothing was sampled.
    hidden: [T, hidden], final hidden states when the step was asked to return them.
    """

    sampled_token_ids: jax.Array
    num_sampled: jax.Array
    logprobs: TokenLogprobs | None = None
    hidden: jax.Array | None = None


def sample(
    model: Model,
    weights: Any,
    state: RunnerState,
    hidden: jax.Array,
    requests: BatchRequests,
    *,
    tier: Tier,
    logits_fn: LogitsFn | None = None,
) -> StepOutput:
    """Sampled ids of a batch.

    hidden: [B, hidden], final hidden state at each request's last token. requests: the batch's per-request arrays.
    logits_fn: called as `logits_fn(logits f32[B, vocab], requests) -> f32[B, vocab]` before sampling. What it returns
    is what log-probabilities are taken of.

    A draw is a function of the request's seed and the position of the new token, so rows of padding and requests
    still in prefill take no randomness from anyone.
    """
    logits = transformer.logits(model, weights, hidden)
    if logits_fn is not None:
        logits = logits_fn(logits, requests)
    ids = sample_tokens(logits, state.sampling.take(requests.idx_mapping), requests.seq_lens, tier=tier)
    samples = requests.samples
    return StepOutput(
        sampled_token_ids=jnp.where(samples, ids, NO_TOKEN)[:, None],
        num_sampled=samples.astype(jnp.int32),
        logprobs=token_logprobs(logits, ids) if covers(tier, "logprobs") else None,
    )
