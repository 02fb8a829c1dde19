"""The first half of a `HostRunner`'s step on the device: the upload is taken apart and the model runs.

The device keeps no state of a request but its KV, arrays for the user's functions, and what the step before sampled:
that is an input of a step which is launched before the host has seen it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.compile.buckets import Bucket
from jaxrunner.host_runner.device_carry import FAILED, TOKEN, DeviceCarry
from jaxrunner.host_runner.input_arrays import upload_layout
from jaxrunner.models import transformer
from jaxrunner.models.model import Model
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.state.block_tables import group_of_layer


class SampledRows(NamedTuple):
    """B rows. seq_lens, total_len, prompt_len, number: i32[B], see `upload_layout`. params: i32[B, P], see
    `SamplingState`. last_ids: i32[B], last input ids. stuck: bool[B], the step before failed for this row, so that this
    one, planned before that was known, has no input and fails likewise.
    """

    seq_lens: jax.Array
    total_len: jax.Array
    prompt_len: jax.Array
    number: jax.Array
    params: jax.Array
    last_ids: jax.Array
    stuck: jax.Array

    @property
    def live(self) -> jax.Array:
        return self.seq_lens > 0

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
    last = part["logits_indices"]
    with jax.named_scope("preprocess"):
        ids, stuck = _newest_ids(carry, part)
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
    with jax.named_scope("forward"):
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
    rows = SampledRows(**named, last_ids=ids[last], stuck=stuck)
    half = HalfStep(hidden[last], rows)
    half = jax.tree.map(lambda a: _padded(a, num_rows), half)
    if num_kept is not None:
        half = half.replace(tokens=_padded(hidden, num_kept))
    return carry.replace(kv=carry.kv.replace(blocks=blocks)), half


def _newest_ids(carry: DeviceCarry, part: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(the step's input ids with those that the step before sampled, rows for which that step failed)."""
    newest_row, last, ids = part["newest_row"], part["logits_indices"], part["input_ids"]
    outcome = carry.outcome[jnp.maximum(newest_row, 0)]
    is_flown, newest = newest_row >= 0, outcome[:, TOKEN]
    out_of_range = len(ids)
    place = jnp.where(is_flown & (newest >= 0), last, out_of_range)
    return ids.at[place].set(newest, mode="drop"), is_flown & (outcome[:, FAILED] == 1)


def _padded(array: jax.Array, length: int) -> jax.Array:
    return jnp.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))
