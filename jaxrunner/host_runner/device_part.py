"""What of a `HostRunner`'s step runs on the device: the upload is taken apart, the model runs, tokens are sampled.

The device keeps no state of a request but its KV, and the tokens that the step before sampled: they are inputs of a
step that is launched before the host has seen them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Bucket, Tier
from jaxrunner.host_runner.input_arrays import HostSizes, upload_layout
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.history import History
from jaxrunner.stages.sample import NO_TOKEN, StepOutput, sample_rows
from jaxrunner.state.block_tables import group_of_layer
from jaxrunner.state.kv_cache import KVCache
from jaxrunner.state.sampling import SamplingState


class DeviceCarry(struct.PyTreeNode):
    """What goes from step to step on the device, donated. newest: i32[R], token that each row of the last step
    sampled, -1 for none. sizes: static."""

    kv: KVCache
    newest: jax.Array
    sizes: HostSizes = struct.field(pytree_node=False)


class SampledRows(NamedTuple):
    """B rows. seq_lens, prompt_len: i32[B]. params: i32[B, P], see `SamplingState`. last_ids: i32[B], last input ids.

    wants: bool[B], a token is due. stuck: bool[B], the step before found no id for this row, so that this one, planned
    before that was known, has no input.
    """

    seq_lens: jax.Array
    prompt_len: jax.Array
    params: jax.Array
    last_ids: jax.Array
    wants: jax.Array
    stuck: jax.Array

    @property
    def samples(self) -> jax.Array:
        return self.wants & ~self.stuck


class HalfStep(struct.PyTreeNode):
    """A step between its forward pass and its sampling. hidden: [B, hidden], at each row's last token."""

    hidden: jax.Array
    rows: SampledRows


def run_forward(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    upload: jax.Array,
    *,
    bucket: Bucket,
    num_rows: int,
    implementation: Implementation = None,
) -> tuple[DeviceCarry, HalfStep]:
    """The model over the tokens of `upload` (i32[n], see `upload_layout`).

    num_rows: rows of the result, at least those of the bucket, so that one `run_sampler` serves every bucket.
    """
    sizes = carry.sizes
    part = upload_layout(bucket, sizes).unpack(upload)
    newest_row, last = part["newest_row"], part["logits_indices"]
    is_newest = newest_row >= 0
    newest = carry.newest[jnp.maximum(newest_row, 0)]
    out_of_range = bucket.num_tokens
    ids = part["input_ids"].at[jnp.where(is_newest, last, out_of_range)].set(jnp.maximum(newest, 0), mode="drop")
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
    rows = SampledRows(
        seq_lens=part["seq_lens"],
        prompt_len=part["prompt_len"],
        params=part["params"],
        last_ids=ids[last],
        wants=part["samples"] == 1,
        stuck=is_newest & (newest == NO_TOKEN),
    )
    half = HalfStep(hidden[last], rows)
    extra = num_rows - bucket.num_reqs
    half = jax.tree.map(lambda a: jnp.pad(a, [(0, extra)] + [(0, 0)] * (a.ndim - 1)), half)
    return carry.replace(kv=carry.kv.replace(blocks=blocks)), half


def run_sampler(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    half: HalfStep,
    lists: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    *,
    tier: Tier,
    num_reqs: int,
) -> tuple[DeviceCarry, StepOutput]:
    """One token for each row of `half` that is due one, of the first `num_reqs`.

    lists: i32[R, n], see `request_lists`; token_ids: i32[num_reqs, L], what the host knows of each row. Both None in
    tiers without constraints.
    """
    rows = SampledRows(*(a[:num_reqs] for a in half.rows))
    sizes, history = carry.sizes, None
    if lists is not None and token_ids is not None:
        index = jnp.arange(num_reqs)
        # The newest token may not have reached the host; it is the last input id.
        token_ids = token_ids.at[index, jnp.maximum(rows.seq_lens - 1, 0)].set(rows.last_ids, mode="drop")
        history = History(token_ids, index, rows.prompt_len)
        lists = lists[:num_reqs]
    params = SamplingState(params=rows.params, lists=lists, sizes=sizes.list_sizes, thinking=sizes.thinking)
    output = sample_rows(transformer.logits(model, weights, half.hidden[:num_reqs]), rows, params, history, tier=tier)
    if output.no_id_left is not None:
        output = output.replace(no_id_left=output.no_id_left | (rows.wants & rows.stuck))
    extra = carry.newest.shape[0] - num_reqs
    newest = jnp.pad(output.sampled_token_ids[:, 0], (0, extra), constant_values=NO_TOKEN)
    return carry.replace(newest=newest), output


def run_decode(
    model: Model,
    weights: Any,
    carry: DeviceCarry,
    upload: jax.Array,
    *,
    bucket: Bucket,
    implementation: Implementation = None,
) -> tuple[DeviceCarry, StepOutput]:
    """A whole step of a tier without constraints."""
    rows = bucket.num_reqs
    carry, half = run_forward(
        model, weights, carry, upload, bucket=bucket, num_rows=rows, implementation=implementation
    )
    return run_sampler(model, weights, carry, half, tier=bucket.tier, num_reqs=rows)
