"""The second half of a `HostRunner`'s step on the device: tokens are sampled, and what the next step needs is left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.compile.buckets import Bucket, Tier
from jaxrunner.host_runner.device_carry import FAILED, TOKEN, DeviceCarry
from jaxrunner.host_runner.first_half import HalfStep, SampledRows, run_forward
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomRun, CustomSampling, SamplingContext
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.stages.sample import StepOutput, sample_rows
from jaxrunner.state.codec import Layout
from jaxrunner.state.reports import raw
from jaxrunner.state.request_arrays import current, with_updates
from jaxrunner.state.sampling import SamplingState


def run_sampler(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    half: HalfStep,
    grammar_bitmask: jax.Array | None = None,
    lists: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    *,
    tier: Tier,
    num_reqs: int,
    custom: CustomSampling = NO_CUSTOM,
    implementation: Implementation = None,
) -> tuple[DeviceCarry, StepOutput]:
    """One token for each row of `half` that is due one, of the first `num_reqs`.

    grammar_bitmask: u32[num_reqs, W], see `jaxrunner.sampling.grammar`. lists: i32[R, n], see `request_lists`, for
    tiers that read them. token_ids: i32[num_reqs, L], what the host knows of each row, for tiers with constraints and
    for the user's functions, `custom`.
    """
    rows = SampledRows(*(a[:num_reqs] for a in half.rows))
    with jax.named_scope("sample"):
        options: dict[str, Any] = {"lists": lists, "token_ids": token_ids, "tier": tier, "custom": custom}
        options |= {"implementation": implementation}
        hidden = half.hidden[:num_reqs]
        output, updates = _sample(model, weights, carry, hidden, rows, grammar_bitmask, **options)
    with jax.named_scope("postprocess"):
        return _commit(carry, rows, output, updates), output


def _sample(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    hidden: jax.Array,
    rows: SampledRows,
    grammar_bitmask: jax.Array | None,
    *,
    lists: jax.Array | None,
    token_ids: jax.Array | None,
    tier: Tier,
    custom: CustomSampling,
    implementation: Implementation,
) -> tuple[StepOutput, Mapping[str, jax.Array]]:
    num_reqs = len(hidden)
    sizes, index, history = carry.sizes, jnp.arange(num_reqs), None
    if token_ids is not None:
        # The newest token may not have reached the host; it is the last input id.
        token_ids = token_ids.at[index, jnp.maximum(rows.seq_lens - 1, 0)].set(rows.last_ids, mode="drop")
        history = History(token_ids, index, rows.prompt_len)
    params = SamplingState(
        params=rows.params,
        lists=None if lists is None else lists[:num_reqs],
        sizes=sizes.list_sizes,
        thinking=sizes.thinking,
        reports=sizes.reports,
        custom=sizes.custom,
    )
    run = None
    if custom != NO_CUSTOM and history is not None:
        context = SamplingContext(history, rows.number, rows.seq_lens, rows.samples, params.seed)
        run = CustomRun(custom, context, current(carry.extras, custom.declared, index, rows.total_len))
    logits = transformer.logits(model, weights, hidden, dtype=hidden.dtype)
    options: dict[str, Any] = {"tier": tier, "custom": run, "grammar_bitmask": grammar_bitmask}
    options |= {"implementation": implementation}
    output, updates = sample_rows(logits, rows, params, history, **options)
    return _with_stuck(output, rows), updates


def _commit(carry: DeviceCarry, rows: SampledRows, output: StepOutput, updates: Mapping[str, jax.Array]) -> DeviceCarry:
    """Leave to the next step what this one sampled, and the new values of the rows' arrays."""
    num_reqs = len(output.num_sampled)
    if updates:
        # A row without a token is out of range, which drops its values.
        written = jnp.where(output.num_sampled > 0, jnp.arange(num_reqs), carry.num_rows)
        extras = with_updates(carry.extras, updates, written, rows.total_len + output.num_sampled)
        carry = carry.replace(extras=extras)
    tokens = output.sampled_token_ids[:, 0]
    failed = jnp.zeros_like(tokens) if output.failed is None else output.failed.astype(tokens.dtype)
    columns = {TOKEN: tokens, FAILED: failed}
    outcome = jnp.stack([columns[i] for i in range(len(columns))], axis=1)
    return carry.replace(outcome=jnp.pad(outcome, ((0, carry.num_rows - num_reqs), (0, 0))))


def _with_stuck(output: StepOutput, rows: SampledRows) -> StepOutput:
    """A stuck row fails too."""
    if output.failed_by_nan is not None:
        return output.replace(failed_by_nan=output.failed_by_nan | rows.stuck)
    if output.no_id_left is not None:
        return output.replace(no_id_left=output.no_id_left | rows.stuck)
    return output  # no row can fail, so none can be stuck


def score_layout(num_rows: int) -> Layout:
    """The upload of `run_scores`, N tokens of prompts: place: i32[N], of the token before each, in the step. scored:
    i32[N], its id. row: i32[N], of its request."""
    return Layout(tuple((name, (num_rows,)) for name in ("place", "scored", "row")))


def run_scores(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    half: HalfStep,
    lists: jax.Array,
    packed: jax.Array,
    *,
    num_rows: int,
) -> tuple[DeviceCarry, TokenLogprobs]:
    """Log-probabilities of prompt tokens behind a step's first half, see `jaxrunner.stages.prompt_logprobs`.

    lists: i32[R, n], of all rows. packed: by `score_layout(num_rows)`.
    """
    assert half.tokens is not None
    part, sizes = score_layout(num_rows).unpack(packed), carry.sizes
    logits = transformer.logits(model, weights, half.tokens[part["place"]], dtype=half.tokens.dtype)
    listed = lists[part["row"], sizes.list_sizes.columns["prompt_logprob_ids"]]
    return carry, token_logprobs(logits, part["scored"], listed, raw(sizes.reports))


def run_decode(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    upload: jax.Array,
    *,
    bucket: Bucket,
    implementation: Implementation = None,
) -> tuple[DeviceCarry, StepOutput]:
    """A whole step of a tier that reads neither lists nor tokens, without grammars and functions of the user's."""
    rows = bucket.num_reqs
    options: dict[str, Any] = {"implementation": implementation}
    carry, half = run_forward(model, weights, carry, upload, bucket=bucket, num_rows=rows, **options)
    return run_sampler(model, weights, carry, half, tier=bucket.tier, num_reqs=rows, **options)
