"""The step: the five stages composed into one pure function, and the two halves of it that a runner may split.

    apply_diffs -> prepare_inputs -> forward -> sample -> commit

The padding contract, which holds at every boundary between the stages:
rows of padding map to the parking row; the tail of query_start_loc equals the number of live tokens; seq_lens, ids
and positions are 0; slots are -1 and are masked by every consumer, because a negative index wraps in JAX even with
mode="drop"; masked values are zeroed by `where` before a product, because 0 * NaN is NaN; attention over no keys gives
zeros; a padded row samples -1, changes no counter and takes no random bits of a live row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Bucket, Tier
from jaxrunner.errors import NotBuiltError
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomSampling
from jaxrunner.stages.apply_diffs import apply_diffs
from jaxrunner.stages.batch import BatchRequests, pad_requests
from jaxrunner.stages.commit import commit
from jaxrunner.stages.forward import forward
from jaxrunner.stages.inputs import StepInput
from jaxrunner.stages.prepare_inputs import build_batch
from jaxrunner.stages.sample import StepOutput, sample
from jaxrunner.state.alive import check_alive
from jaxrunner.state.runner_state import RunnerState


class Pending(struct.PyTreeNode):
    """A step between its forward pass and its sampling.

    hidden: [B, hidden], final hidden state at each request's last token. requests: the batch's per-request arrays.
    tokens: [N, hidden], those of all tokens, for log-probabilities of prompts; None where they were not kept.
    """

    hidden: jax.Array
    requests: BatchRequests
    tokens: jax.Array | None = None

    @property
    def last_tokens(self) -> Pending:
        """What `finish_step` needs."""
        return self if self.tokens is None else self.replace(tokens=None)


def step(
    model: Model,
    weights: Any,
    state: RunnerState,
    inputs: StepInput | jax.Array,
    *,
    bucket: Bucket,
    logits_processors: Any = (),
    sampler: Any = None,
    grammar_bitmask: jax.Array | None = None,
    implementation: Implementation = None,
    return_hidden: bool = False,
    return_scores: bool = False,
) -> tuple[RunnerState, StepOutput]:
    """One step: run the scheduled tokens, sample, and return the new state and the output.

    model: static. weights: the pytree `load` gave. state: not donated here; put `step` into your own `jax.jit` with
    `donate_argnames="state"` to update the KV cache in place. inputs: a `StepInput`, or what `StepInput.pack(bucket)`
    gave (an i32 vector, the form to pass through a jit). bucket: static shape, see `Ladder.pick`.
    logits_processors, sampler: functions of your own, those that the state was made for, see
    `jaxrunner.sampling.custom`. grammar_bitmask: u32[bucket.num_reqs, W], ids that each request may take next, see
    `jaxrunner.sampling.grammar`. implementation: None for the best, a name, a name per op, or an attention of your own
    (`jaxrunner.pallas.custom_attention`). return_hidden, return_scores: put the final hidden states [T, hidden], or the
    scores that tokens are drawn from [B, vocab], into the output.

    Raises CapacityError if the inputs do not fit the bucket, DonatedStateError for a consumed state.
    """
    check_alive(state)
    packed = jnp.asarray(inputs.pack(bucket) if isinstance(inputs, StepInput) else inputs)
    state, pending, hidden = _first_half(model, weights, state, packed, bucket=bucket, implementation=implementation)
    options: dict[str, Any] = {"custom": CustomSampling.of(logits_processors, sampler)}
    options |= {"grammar_bitmask": grammar_bitmask, "return_scores": return_scores}
    options |= {"tier": bucket.tier, "implementation": implementation}
    state, output = finish_step(model, weights, state, pending, **options)
    return state, output.replace(hidden=hidden) if return_hidden else output


def begin_step(
    model: Model,
    weights: Any,
    state: RunnerState,
    packed: jax.Array,
    *,
    bucket: Bucket,
    pending_reqs: int,
    pending_tokens: int | None = None,
    implementation: Implementation = None,
) -> tuple[RunnerState, Pending]:
    """The first three stages. The result is padded to `pending_reqs` rows, and to `pending_tokens` tokens if these are
    to be kept, so that one `finish_step` serves every bucket: executables then add up instead of multiplying."""
    state, pending, tokens = _first_half(model, weights, state, packed, bucket=bucket, implementation=implementation)
    extra = pending_reqs - pending.hidden.shape[0]
    hidden = jnp.pad(pending.hidden, ((0, extra), (0, 0)))
    kept = None if pending_tokens is None else jnp.pad(tokens, ((0, pending_tokens - tokens.shape[0]), (0, 0)))
    return state, Pending(hidden=hidden, requests=pad_requests(pending.requests, pending_reqs), tokens=kept)


def finish_step(
    model: Model,
    weights: Any,
    state: RunnerState,
    pending: Pending,
    *,
    tier: Tier,
    num_reqs: int | None = None,
    custom: CustomSampling = NO_CUSTOM,
    grammar_bitmask: jax.Array | None = None,
    return_scores: bool = False,
    implementation: Implementation = None,
) -> tuple[RunnerState, StepOutput]:
    """The last two stages, for the first `num_reqs` rows of `pending` (all by default).

    A request that fails (`StepOutput.failed`) is as it was before the step: its tokens do not count as computed, and
    are run again in the next step, to the same end.
    """
    rows = slice(0, num_reqs)
    requests = BatchRequests(*(a[rows] for a in pending.requests))
    options: dict[str, Any] = {"custom": custom, "grammar_bitmask": grammar_bitmask, "return_scores": return_scores}
    options["implementation"] = implementation
    with jax.named_scope("sample"):
        output, updates = sample(model, weights, state, pending.hidden[rows], requests, tier=tier, **options)
    undone = None if output.failed is None else jnp.where(output.failed, requests.query_lens, 0)
    ids, counts = output.sampled_token_ids, output.num_sampled
    with jax.named_scope("postprocess"):
        state = commit(state, requests, ids, counts, undone, updates=updates, implementation=implementation)
    return state, output


def _first_half(model, weights, state, packed, *, bucket, implementation):
    if state.num_draft_tokens:
        raise NotBuiltError("verifying draft tokens is not built; use init_state(num_draft_tokens=0)")
    with jax.named_scope("preprocess"):
        state = apply_diffs(state, packed, bucket=bucket)
        batch = build_batch(state, packed, bucket=bucket, implementation=implementation)
    with jax.named_scope("forward"):
        state, hidden = forward(model, weights, state, batch, bucket=bucket, implementation=implementation)
    return state, Pending(hidden=hidden[batch.logits_indices], requests=batch.requests), hidden
