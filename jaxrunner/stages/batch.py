"""`StepBatch`: the flat, padded arrays of one step, between input preparation and the model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.state.block_tables import BlockTables


class StepBatch(struct.PyTreeNode):
    """B requests and T tokens after padding, K draft tokens, G KV-cache groups. All int32.

    num_reqs: scalar, live requests. idx_mapping: [B], state row of each request, 0 (parking) in padding.
    query_start_loc: [B + 1], exclusive prefix sum of the query lengths, tail = number of live tokens.
    seq_lens: [B], keys each request attends over, 0 in padding. prefill_len: [B].
    num_draft_tokens: [B]. positions, input_ids: [T], 0 in padding.
    logits_indices: [B * (K + 1)], token whose hidden state becomes a logits row.
    block_table: per group [B, W]. slot_mapping: per group [T], -1 in padding.
    """

    num_reqs: jax.Array
    idx_mapping: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    prefill_len: jax.Array
    num_draft_tokens: jax.Array
    positions: jax.Array
    input_ids: jax.Array
    logits_indices: jax.Array
    block_table: tuple[jax.Array, ...]
    slot_mapping: tuple[jax.Array, ...]

    @property
    def requests(self) -> BatchRequests:
        """The per-request part, which sampling and commit need after the model has run."""
        query_lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        return BatchRequests(self.idx_mapping, query_lens, self.seq_lens, self.prefill_len, self.num_draft_tokens)


class BatchRequests(NamedTuple):
    """idx_mapping, query_lens, seq_lens, prefill_len, num_draft_tokens: i32[B], as in `StepBatch`."""

    idx_mapping: jax.Array
    query_lens: jax.Array
    seq_lens: jax.Array
    prefill_len: jax.Array
    num_draft_tokens: jax.Array

    @property
    def live(self) -> jax.Array:
        """bool[B]: rows of padding map to the parking row."""
        return self.idx_mapping != 0

    @property
    def samples(self) -> jax.Array:
        """bool[B]: rows whose prefill is complete after this step, so that a token is sampled."""
        return self.live & (self.query_lens > 0) & (self.seq_lens >= self.prefill_len)


def attention_metadata(batch: StepBatch, tables: BlockTables, query_len: int | None) -> tuple[AttentionMetadata, ...]:
    """One per KV-cache group; a layer finds its own through `BlockTables.group_of_layer`."""
    return tuple(
        AttentionMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_reqs=batch.num_reqs,
            block_table=batch.block_table[g],
            slot_mapping=batch.slot_mapping[g],
            query_len=query_len,
        )
        for g in range(len(tables.groups))
    )


def pad_requests(requests: BatchRequests, num_reqs: int) -> BatchRequests:
    """The same with zero rows (parking row, no tokens) appended up to `num_reqs`."""
    extra = num_reqs - requests.idx_mapping.shape[0]
    return BatchRequests(*(jnp.pad(a, (0, extra)) for a in requests)) if extra else requests
