"""Stage 4: logits of the rows that need them, and one token for each request whose prefill is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import TIER_FEATURES, Feature, Tier
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.sampling.custom import NO_CUSTOM, CustomRun, CustomSampling, SamplingContext
from jaxrunner.sampling.grammar import mask_by_grammar
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.request_arrays import current
from jaxrunner.state.runner_state import RunnerState

NO_TOKEN = -1


class StepOutput(struct.PyTreeNode):
    """sampled_token_ids: i32[B, K + 1], -1 where nothing was sampled. num_sampled: i32[B].

    no_id_left: bool[B], requests whose constraints forbid every id, or whose custom sampler took a forbidden one: they
    get no token, and their rows stay as they were before the step. None where there are neither.
    logprobs: of the "full" tier, None in the others; junk in rows where nothing was sampled. sampling_mask: u32[B, W],
    of the same tier, see `jaxrunner.sampling.packed_bits`.
    hidden: [T, hidden], final hidden states, and scores: f32[B, vocab], softmax(scores) being what each token was drawn
    from (a greedy request's: its logits after constraints), when the step was asked to return them.
    """

    sampled_token_ids: jax.Array
    num_sampled: jax.Array
    logprobs: TokenLogprobs | None = None
    no_id_left: jax.Array | None = None
    sampling_mask: jax.Array | None = None
    hidden: jax.Array | None = None
    scores: jax.Array | None = None


def sample(
    model: Model,
    weights: Any,
    state: RunnerState,
    hidden: jax.Array,
    requests: BatchRequests,
    *,
    tier: Tier,
    custom: CustomSampling = NO_CUSTOM,
    grammar_bitmask: jax.Array | None = None,
    return_scores: bool = False,
) -> tuple[StepOutput, Mapping[str, jax.Array]]:
    """(sampled ids of a batch, new values of the rows' arrays that custom functions update).

    hidden: [B, hidden], final hidden state at each request's last token. requests: the batch's per-request arrays.
    custom: see `jaxrunner.sampling.custom`. grammar_bitmask: u32[B, W], see `jaxrunner.sampling.grammar`.

    A draw is a function of the request's seed and the position of the new token, so rows of padding and requests
    still in prefill take no randomness from anyone.
    """
    logits = transformer.logits(model, weights, hidden)
    if grammar_bitmask is not None:
        logits = mask_by_grammar(logits, grammar_bitmask)
    rows, features = requests.idx_mapping, TIER_FEATURES[tier]
    history = History(state.requests.token_ids, rows, state.requests.prompt_len[rows])
    params = state.sampling.take(rows)
    run = _custom_run(state, requests, history, params.seed, custom)
    sampled = sample_tokens(logits, params, requests.seq_lens, tier=tier, history=history, custom=run)
    samples, no_id_left = requests.samples, sampled.no_id_left
    if no_id_left is not None:
        no_id_left &= samples
        samples &= ~no_id_left
    output = StepOutput(
        sampled_token_ids=jnp.where(samples, sampled.token_ids, NO_TOKEN)[:, None],
        num_sampled=samples.astype(jnp.int32),
        no_id_left=no_id_left,
        logprobs=token_logprobs(logits, sampled.token_ids) if Feature.LOGPROBS in features else None,
        sampling_mask=sampled.sampling_mask,
        scores=sampled.scores if return_scores else None,
    )
    return output, sampled.updates


def _custom_run(
    state: RunnerState, requests: BatchRequests, history: History, seed: jax.Array, custom: CustomSampling
) -> CustomRun | None:
    custom.check_state(state.sampling.custom)
    if custom == NO_CUSTOM:
        return None
    context = SamplingContext(history, requests.seq_lens, requests.samples, seed)
    num_tokens = state.requests.total_len[history.rows]
    return CustomRun(custom, context, current(state.extras, custom.declared, history.rows, num_tokens))
