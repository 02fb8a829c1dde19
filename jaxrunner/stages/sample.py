"""Stage 4: logits of the rows that need them, and one token for each request whose prefill is complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Tier
from jaxrunner.contract import NO_TOKEN
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomRun, CustomSampling, SamplingContext
from jaxrunner.sampling.grammar import is_allowed, mask_by_grammar
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs
from jaxrunner.sampling.nans import count_nans
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.stages.batch import BatchRequests
from jaxrunner.state.request_arrays import current
from jaxrunner.state.runner_state import RunnerState
from jaxrunner.state.sampling import SamplingState


class SamplingRows(Protocol):
    """What sampling asks of a batch of B rows. seq_lens: i32[B], the length of each, which is where its new token goes.
    live: bool[B], no padding. samples: bool[B], whether it gets a token."""

    @property
    def seq_lens(self) -> jax.Array: ...
    @property
    def live(self) -> jax.Array: ...
    @property
    def samples(self) -> jax.Array: ...


class StepOutput(struct.PyTreeNode):
    """sampled_token_ids: i32[B, K + 1], -1 where nothing was sampled. num_sampled: i32[B].

    no_id_left: bool[B], requests whose constraints forbid every id, or whose custom sampler took a forbidden one: they
    get no token, and their rows stay as they were before the step. None where there are neither, nor a grammar mask.
    num_nans: i32[B], of each request's logits; None unless `Reports.nan_check` asks. failed_by_nan: bool[B], requests
    with some, treated likewise; None unless it says "fail".
    logprobs: of the tiers that have them, None in the others; junk in rows where nothing was sampled. sampling_mask:
    u32[B, W], likewise, see `jaxrunner.sampling.packed_bits`.
    hidden: [T, hidden], final hidden states, and scores: f32[B, vocab], softmax(scores) being what each token was drawn
    from (a greedy request's: its logits after constraints), when the step was asked to return them.
    """

    sampled_token_ids: jax.Array
    num_sampled: jax.Array
    logprobs: TokenLogprobs | None = None
    no_id_left: jax.Array | None = None
    num_nans: jax.Array | None = None
    failed_by_nan: jax.Array | None = None
    sampling_mask: jax.Array | None = None
    hidden: jax.Array | None = None
    scores: jax.Array | None = None

    @property
    def failed(self) -> jax.Array | None:
        """bool[B], requests that get no token although they should; None where no request can fail."""
        return self.failures()

    def failures(self, *, may_forbid: bool = True) -> jax.Array | None:
        """`failed` of a batch of which one is known: whether anything can forbid its requests ids."""
        if self.no_id_left is None or not may_forbid:
            return self.failed_by_nan
        return self.no_id_left if self.failed_by_nan is None else self.no_id_left | self.failed_by_nan


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
    implementation: Implementation = None,
) -> tuple[StepOutput, Mapping[str, jax.Array]]:
    """(sampled ids of a batch, new values of the rows' arrays that custom functions update).

    hidden: [B, hidden], final hidden state at each request's last token. requests: the batch's per-request arrays.
    custom: see `jaxrunner.sampling.custom`. grammar_bitmask: u32[B, W], see `jaxrunner.sampling.grammar`.

    A draw is a function of the request's seed and the position of the new token, so rows of padding and requests
    still in prefill take no randomness from anyone.
    """
    logits = transformer.logits(model, weights, hidden, dtype=hidden.dtype)
    rows = requests.idx_mapping
    history = History(state.requests.token_ids, rows, state.requests.prompt_len[rows])
    params = state.sampling.take(rows)
    custom.check_state(state.sampling.custom)
    run = None
    if custom != NO_CUSTOM:
        context = SamplingContext(history, rows, requests.seq_lens, requests.samples, params.seed)
        values = current(state.extras, custom.declared, rows, state.requests.total_len[rows])
        run = CustomRun(custom, context, values)
    options: dict[str, Any] = {"grammar_bitmask": grammar_bitmask, "return_scores": return_scores}
    options |= {"implementation": implementation}
    return sample_rows(logits, requests, params, history, tier=tier, custom=run, **options)


def sample_rows(
    logits: jax.Array,
    requests: SamplingRows,
    params: SamplingState,
    history: History | None,
    *,
    tier: Tier,
    custom: CustomRun | None = None,
    grammar_bitmask: jax.Array | None = None,
    return_scores: bool = False,
    implementation: Implementation = None,
) -> tuple[StepOutput, Mapping[str, jax.Array]]:
    """`sample` from the logits on, wherever the rows' parameters and arrays come from.

    logits: [B, vocab], of any floating type; all is computed in float32.
    params: in batch order. history: None only in a tier without constraints and without functions of the user's.
    """
    if grammar_bitmask is not None:
        logits = mask_by_grammar(logits, grammar_bitmask)
    options: dict[str, Any] = {"tier": tier, "history": history, "custom": custom, "implementation": implementation}
    sampled = sample_tokens(logits, params, requests.seq_lens, **options)
    samples, no_id_left, num_nans, failed_by_nan = requests.samples, sampled.no_id_left, None, None
    if no_id_left is None and grammar_bitmask is not None:
        no_id_left = ~is_allowed(grammar_bitmask, sampled.token_ids)
    if no_id_left is not None:
        no_id_left &= samples
        samples &= ~no_id_left
    if params.reports.nan_check != "off":
        num_nans = count_nans(logits, requests.live)
    if num_nans is not None and params.reports.nan_check == "fail":
        failed_by_nan = num_nans > 0
        samples &= ~failed_by_nan
    output = StepOutput(
        sampled_token_ids=jnp.where(samples, sampled.token_ids, NO_TOKEN)[:, None],
        num_sampled=samples.astype(jnp.int32),
        no_id_left=no_id_left,
        num_nans=num_nans,
        failed_by_nan=failed_by_nan,
        logprobs=sampled.logprobs,
        sampling_mask=sampled.sampling_mask,
        scores=sampled.scores if return_scores else None,
    )
    return output, sampled.updates
