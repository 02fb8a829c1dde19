"""Input preparation: from persistent rows to the flat arrays of one step, in one op.

It gathers each request's row through `idx_mapping` and gives positions, input ids, key lengths, the rows of hidden
states that become logits, gathered block tables and slots. All padding comes out neutral, whatever the padded entries
of its inputs hold (see `jaxrunner.step` for the padding contract).

Source: vLLM's V2 runner, `prepare_inputs` and `prepare_attn`, which launch five kernels for it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.pallas.slot_mapping import request_of_token, slot_mapping_xla
from jaxrunner.state.fields import LAST_SAMPLED, NUM_COMPUTED, PREFILL_LEN
from jaxrunner.state.requests import PARKING_ROW


class InputPrep(NamedTuple):
    """B requests, T tokens, K draft tokens, G groups.

    positions: i32[T], 0 in padding. input_ids: i32[T], 0 in padding. seq_lens: i32[B], keys of each request, 0 in
    padding. logits_indices: i32[B * (K + 1)], token index of each logits row; a request with d drafts uses the first
    d + 1 of its K + 1 entries, the others repeat its last token, padding gives 0. block_table: per group i32[B, W],
    0 (the null block) in padding rows and past a row's blocks. slot_mapping: per group i32[T], -1 in padding.
    """

    positions: jax.Array
    input_ids: jax.Array
    seq_lens: jax.Array
    logits_indices: jax.Array
    block_table: tuple[jax.Array, ...]
    slot_mapping: tuple[jax.Array, ...]


def input_prep(
    idx_mapping: Int32[Array, "B"],
    query_start_loc: Int32[Array, "B1"],
    num_reqs: Int32[Array, ""],
    counters: Int32[Array, "R C"],
    token_ids: Int32[Array, "R L"],
    block_tables: tuple[Int32[Array, "R _"], ...],
    num_blocks: Int32[Array, "R G"],
    draft_tokens: Int32[Array, "R K"] | None = None,
    num_draft_tokens: Int32[Array, "B"] | None = None,
    *,
    num_tokens: int,
    block_sizes: tuple[int, ...],
    implementation: Implementation = None,
) -> InputPrep:
    """The arrays of one step.

    idx_mapping: i32[B], state row of each request of the batch; entries from num_reqs on are ignored.
    query_start_loc: i32[B + 1]; entry num_reqs is the number of live tokens, later entries are ignored.
    num_reqs: i32 scalar, live requests. counters, token_ids, draft_tokens: `RequestState`.
    block_tables: per group i32[R, W], W a multiple of 128. num_blocks: i32[R, G], columns in use.
    num_draft_tokens: i32[B], drafts scheduled per request, at most K. num_tokens: T, padded. block_sizes: per group.

    Input ids: a position below the prefill length takes the known token; a decode takes the last sampled token, which
    never left the device, followed by its drafts.
    """
    run = input_prep_xla
    if resolve("input_prep", implementation) == "mosaic":
        from jaxrunner.pallas.input_prep_mosaic import input_prep_mosaic as run
    return run(
        idx_mapping,
        query_start_loc,
        num_reqs,
        counters,
        token_ids,
        block_tables,
        num_blocks,
        draft_tokens,
        num_draft_tokens,
        num_tokens=num_tokens,
        block_sizes=block_sizes,
    )


def input_prep_xla(
    idx_mapping: jax.Array,
    query_start_loc: jax.Array,
    num_reqs: jax.Array,
    counters: jax.Array,
    token_ids: jax.Array,
    block_tables: tuple[jax.Array, ...],
    num_blocks: jax.Array,
    draft_tokens: jax.Array | None = None,
    num_draft_tokens: jax.Array | None = None,
    *,
    num_tokens: int,
    block_sizes: tuple[int, ...],
) -> InputPrep:
    """The specification."""
    batch = jnp.arange(idx_mapping.shape[0], dtype=jnp.int32)
    live = batch < num_reqs
    rows = jnp.where(live, idx_mapping, PARKING_ROW)
    computed, prefill_len = counters[rows, NUM_COMPUTED], counters[rows, PREFILL_LEN]
    bounds = jnp.where(jnp.arange(batch.size + 1) <= num_reqs, query_start_loc, query_start_loc[num_reqs])
    starts, ends = bounds[:-1], bounds[1:]
    seq_lens = jnp.where(live, computed + ends - starts, 0)
    drafts = jnp.where(live, num_draft_tokens, 0) if num_draft_tokens is not None else jnp.zeros_like(rows)

    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    live_token = tokens < bounds[-1]
    request = request_of_token(bounds, num_tokens)
    row = rows[request]
    positions = jnp.where(live_token, computed[request] + tokens - starts[request], 0)

    from_end = ends[request] - 1 - tokens
    seq_len, prefill, num_drafts = seq_lens[request], prefill_len[request], drafts[request]
    decoding = seq_len > prefill
    takes_last = decoding & (from_end == num_drafts) & (seq_len - num_drafts - 1 >= prefill)
    ids = token_ids[row, jnp.minimum(positions, token_ids.shape[1] - 1)]
    ids = jnp.where(takes_last, counters[row, LAST_SAMPLED], ids)
    if draft_tokens is not None:
        column = jnp.clip(num_drafts - 1 - from_end, 0, draft_tokens.shape[1] - 1)
        ids = jnp.where(decoding & (from_end < num_drafts), draft_tokens[row, column], ids)

    width = 1 + (draft_tokens.shape[1] if draft_tokens is not None else 0)
    entry = jnp.arange(width, dtype=jnp.int32)[None, :]
    last = jnp.maximum(ends - 1, 0)[:, None]
    logits_indices = jnp.minimum(ends[:, None] - 1 - drafts[:, None] + entry, last)
    logits_indices = jnp.where(live[:, None], jnp.maximum(logits_indices, 0), 0)

    gathered = tuple(
        jnp.where(jnp.arange(t.shape[1])[None, :] < num_blocks[rows, g][:, None], t[rows], 0) * live[:, None]
        for g, t in enumerate(block_tables)
    )
    slots = tuple(
        slot_mapping_xla(
            bounds,
            positions,
            table,
            block_size=size,
            blocks_per_kv_block=1,
            cp_world_size=1,
            cp_rank=0,
            cp_interleave=1,
        )
        for table, size in zip(gathered, block_sizes, strict=True)
    )
    return InputPrep(
        positions=positions,
        input_ids=jnp.where(live_token, ids, 0),
        seq_lens=seq_lens,
        logits_indices=logits_indices.reshape(-1),
        block_table=gathered,
        slot_mapping=slots,
    )
