"""Stage 4: logits of the rows that need them, and one token for each request whose prefill is complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import TIER_FEATURES, Feature, Tier
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.sampling.grammar import mask_by_grammar
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.runner_state import RunnerState
from jaxrunner.state.sampling import SamplingState

NO_TOKEN = -1
LogitsFn = Callable[[jax.Array, BatchRequests], jax.Array]


class SamplingRows(Protocol):
    """What sampling asks of a batch: i32[B] the length of each row, which is where its new token goes, and bool[B]
    whether it gets one."""

    @property
    def seq_lens(self) -> jax.Array: ...
    @property
    def samples(self) -> jax.Array: ...


class StepOutput(struct.PyTreeNode):
    """sampled_token_ids: i32[B, K + 1], -1 where nothing was sampled. num_sampled: i32[B].

    no_id_left: bool[B], requests whose constraints forbid every id: they get no token, and their rows stay as they were
    before the step. None in tiers without constraints.
    logprobs: of the "full" tier, None in the others; junk in rows where nothing was sampled. sampling_mask: u32[B, W],
    of the same tier, see `jaxrunner.sampling.packed_bits`.
    hidden: [T, hidden], final hidden states when the step was asked to return them.
    """

    sampled_token_ids: jax.Array
    num_sampled: jax.Array
    logprobs: TokenLogprobs | None = None
    no_id_left: jax.Array | None = None
    sampling_mask: jax.Array | None = None
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
    grammar_bitmask: jax.Array | None = None,
) -> StepOutput:
    """Sampled ids of a batch.

    hidden: [B, hidden], final hidden state at each request's last token. requests: the batch's per-request arrays.
    logits_fn: called as `logits_fn(logits f32[B, vocab], requests) -> f32[B, vocab]` before sampling. What it returns
    is what log-probabilities are taken of. grammar_bitmask: u32[B, W], see `jaxrunner.sampling.grammar`.

    A draw is a function of the request's seed and the position of the new token, so rows of padding and requests
    still in prefill take no randomness from anyone.
    """
    logits = transformer.logits(model, weights, hidden)
    if logits_fn is not None:
        logits = logits_fn(logits, requests)
    if grammar_bitmask is not None:
        logits = mask_by_grammar(logits, grammar_bitmask)
    rows = requests.idx_mapping
    history = History(state.requests.token_ids, rows, state.requests.prompt_len[rows])
    return sample_rows(logits, requests, state.sampling.take(rows), history, tier=tier)


def sample_rows(
    logits: jax.Array, requests: SamplingRows, params: SamplingState, history: History | None, *, tier: Tier
) -> StepOutput:
    """`sample` from the logits on, wherever the rows' parameters come from.

    params: in batch order. history: None only in a tier without constraints.
    """
    features = TIER_FEATURES[tier]
    sampled = sample_tokens(logits, params, requests.seq_lens, tier=tier, history=history)
    samples, no_id_left = requests.samples, sampled.no_id_left
    if no_id_left is not None:
        no_id_left &= samples
        samples &= ~no_id_left
    return StepOutput(
        sampled_token_ids=jnp.where(samples, sampled.token_ids, NO_TOKEN)[:, None],
        num_sampled=samples.astype(jnp.int32),
        no_id_left=no_id_left,
        logprobs=token_logprobs(logits, sampled.token_ids) if Feature.LOGPROBS in features else None,
        sampling_mask=sampled.sampling_mask,
    )
