"""What of a `HostRunner`'s step runs on the device: the upload is taken apart, the model runs, tokens are sampled.

The device keeps no state of a request but its KV, arrays for the user's functions, and what the step before sampled:
that is an input of a step which is launched before the host has seen it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Bucket, Tier
from jaxrunner.host_runner.device_carry import FAILED, NUM_NANS, TOKEN, DeviceCarry
from jaxrunner.host_runner.input_arrays import upload_layout
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomRun, CustomSampling, SamplingContext
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.stages.sample import StepOutput, sample_rows
from jaxrunner.state.block_tables import group_of_layer
from jaxrunner.state.codec import Layout
from jaxrunner.state.reports import raw
from jaxrunner.state.request_arrays import current, with_updates
from jaxrunner.state.sampling import SamplingState


class SampledRows(NamedTuple):
    """B rows. seq_lens, total_len, prompt_len, number: i32[B], see `upload_layout`. params: i32[B, P], see
    `SamplingState`. last_ids: i32[B], last input ids. before: i32[B, 3], what the step before left for the row, see
    `DeviceCarry.outcome`; zeros if that is over.
    """

    seq_lens: jax.Array
    total_len: jax.Array
    prompt_len: jax.Array
    number: jax.Array
    params: jax.Array
    last_ids: jax.Array
    before: jax.Array

    @property
    def live(self) -> jax.Array:
        return self.seq_lens > 0

    @property
    def stuck(self) -> jax.Array:
        """bool[B]: the step before failed for this row, so that this one, planned before that was known, has no input
        and fails likewise."""
        return self.before[:, FAILED] == 1

    @property
    def samples(self) -> jax.Array:
        return self.live & (self.seq_lens >= self.total_len) & ~self.stuck


class HalfStep(struct.PyTreeNode):
    """A step between its forward pass and its sampling. hidden: [B, hidden], at each row's last token.

    tokens: [T, hidden], of all tokens, for log-probabilities of prompts; None where they were not kept.
    """

    hidden: jax.Array
    rows: SampledRows
    tokens: jax.Array | None = None

    @property
    def last_tokens(self) -> HalfStep:
        """What `run_sampler` needs."""
        return self.replace(tokens=None)


def run_forward(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    upload: jax.Array,
    *,
    bucket: Bucket,
    num_rows: int,
    num_kept: int | None = None,
    implementation: Implementation = None,
) -> tuple[DeviceCarry, HalfStep]:
    """The model over the tokens of `upload` (i32[n], see `upload_layout`).

    num_rows: rows of the result, and num_kept: its tokens if all are kept; at least those of the bucket, so that one
    `run_sampler` serves every bucket.
    """
    sizes = carry.sizes
    part = upload_layout(bucket, sizes).unpack(upload)
    newest_row, last = part["newest_row"], part["logits_indices"]
    is_flown = newest_row >= 0
    before = jnp.where(is_flown[:, None], carry.outcome[jnp.maximum(newest_row, 0)], 0)
    is_newest = is_flown & (before[:, TOKEN] >= 0)
    out_of_range = bucket.num_tokens
    ids = part["input_ids"].at[jnp.where(is_newest, last, out_of_range)].set(before[:, TOKEN], mode="drop")
    metadata = tuple(
        AttentionMetadata(
            query_start_loc=part["query_start_loc"],
            seq_lens=part["seq_lens"],
            num_reqs=part["num_reqs"],
            block_table=part["block_table"][:, columns],
            slot_mapping=slots,
            query_len=bucket.query_len if bucket.kind == "decode" else None,
        )
        for columns, slots in zip(sizes.columns, part["slot_mapping"], strict=True)
    )
    blocks, hidden = transformer.forward(
        model,
        weights,
        carry.kv.blocks,
        ids,
        part["positions"],
        metadata,
        group_of_layer(sizes.groups),
        kv_scales=carry.kv.scales,
        max_model_len=sizes.max_model_len,
        implementation=implementation,
    )
    named = {name: part[name] for name in ("seq_lens", "total_len", "prompt_len", "number", "params")}
    rows = SampledRows(**named, last_ids=ids[last], before=before)
    half = HalfStep(hidden[last], rows)
    half = jax.tree.map(lambda a: _padded(a, num_rows), half)
    if num_kept is not None:
        half = half.replace(tokens=_padded(hidden, num_kept))
    return carry.replace(kv=carry.kv.replace(blocks=blocks)), half


def _padded(array: jax.Array, length: int) -> jax.Array:
    return jnp.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))


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
) -> tuple[DeviceCarry, StepOutput]:
    """One token for each row of `half` that is due one, of the first `num_reqs`.

    grammar_bitmask: u32[num_reqs, W], see `jaxrunner.sampling.grammar`. lists: i32[R, n], see `request_lists`, for
    tiers that read them. token_ids: i32[num_reqs, L], what the host knows of each row, for tiers with constraints and
    for the user's functions, `custom`.
    """
    rows = SampledRows(*(a[:num_reqs] for a in half.rows))
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
    logits = transformer.logits(model, weights, half.hidden[:num_reqs])
    options: dict[str, Any] = {"tier": tier, "custom": run, "grammar_bitmask": grammar_bitmask}
    output, updates = sample_rows(logits, rows, params, history, **options)
    if updates:
        written = jnp.where(output.num_sampled > 0, index, carry.num_rows)  # out of range: dropped
        extras = with_updates(carry.extras, updates, written, rows.total_len + output.num_sampled)
        carry = carry.replace(extras=extras)
    output = _with_stuck(output, rows)
    outcome = _outcome(output)
    return carry.replace(outcome=jnp.pad(outcome, ((0, carry.num_rows - num_reqs), (0, 0)))), output


def _with_stuck(output: StepOutput, rows: SampledRows) -> StepOutput:
    """A stuck row fails for the reason that the step before had."""
    if output.num_nans is not None:
        output = output.replace(num_nans=jnp.where(rows.stuck, rows.before[:, NUM_NANS], output.num_nans))
    if output.failed_by_nan is not None:
        return output.replace(failed_by_nan=output.failed_by_nan | rows.stuck)
    if output.no_id_left is not None:
        return output.replace(no_id_left=output.no_id_left | rows.stuck)
    return output  # no row can fail, so none can be stuck


def _outcome(output: StepOutput) -> jax.Array:
    tokens = output.sampled_token_ids[:, 0]
    none = jnp.zeros_like(tokens)
    failed = none if output.failed is None else output.failed.astype(jnp.int32)
    columns = {TOKEN: tokens, FAILED: failed, NUM_NANS: none if output.num_nans is None else output.num_nans}
    return jnp.stack([columns[i] for i in range(len(columns))], axis=1)


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
    logits = transformer.logits(model, weights, half.tokens[part["place"]])
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
    carry, half = run_forward(
        model, weights, carry, upload, bucket=bucket, num_rows=rows, implementation=implementation
    )
    return run_sampler(model, weights, carry, half, tier=bucket.tier, num_reqs=rows)
