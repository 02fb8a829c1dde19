"""Input preparation as one fused Mosaic GPU kernel, bit-equal to `input_prep_xla`.

The grid is a list of independent pieces of work, one a CTA: runs of tokens first (the longest chains of loads), then
pieces of block-table rows, the first of which also write their request's length and logits indices.

A run of tokens is scalar code that loads for all its tokens before it stores for any. Prefills have a shorter way: a
window of 128 tokens inside one chunk is contiguous in the token history and in the block table, so one CTA writes it
with vectors and the others of that window have nothing to do.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.input_prep import InputPrep
from jaxrunner.pallas.slot_mapping_mosaic import default_tokens_per_cta, find_request, requests_of_run
from jaxrunner.state.block_tables import NULL_BLOCK, PAD_SLOT_ID, TABLE_WIDTH_MULTIPLE
from jaxrunner.state.fields import LAST_SAMPLED, NUM_COMPUTED, PREFILL_LEN
from jaxrunner.state.requests import PARKING_ROW

WINDOW = compat.LANES
MIN_WINDOW_BLOCK_SIZE = 4
"""Smaller blocks would need more loads a window than the scalar code."""
COLUMNS_PER_CTA = 1024
"""Most columns of a block table that one CTA copies."""


class _Refs(NamedTuple):
    """Operands of the kernel, as references; draft_tokens and num_draft_tokens may be None."""

    idx_mapping: jax.Array
    query_start_loc: jax.Array
    num_reqs: jax.Array
    counters: jax.Array
    token_ids: jax.Array
    num_blocks: jax.Array
    draft_tokens: jax.Array | None
    num_draft_tokens: jax.Array | None
    block_tables: tuple[jax.Array, ...]


class _Request(NamedTuple):
    """One request's scalars; in padding start and end are garbage and the others those of the parking row."""

    live: jax.Array
    row: jax.Array
    start: jax.Array
    end: jax.Array
    computed: jax.Array
    prefill_len: jax.Array
    num_drafts: jax.Array

    @property
    def seq_len(self) -> jax.Array:
        return self.computed + self.end - self.start


def input_prep_mosaic(
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
    tokens_per_cta: int | None = None,
) -> InputPrep:
    """See `input_prep` for the arguments and the result.

    tokens_per_cta: tokens of a CTA, all unrolled; a power of two up to 128, by default chosen from num_tokens.
    Raises ImplementationError where Mosaic GPU kernels cannot run, and for a table whose width is not a multiple of
    128.
    """
    batch = idx_mapping.shape[0]
    run = tokens_per_cta or default_tokens_per_cta(num_tokens)
    if WINDOW % run:
        raise ValueError(f"tokens_per_cta {run} must divide {WINDOW}")
    widths = [table.shape[1] for table in block_tables]
    if not widths or any(width % TABLE_WIDTH_MULTIPLE for width in widths):
        raise ImplementationError(
            f"input_prep: the mosaic implementation needs block tables of a multiple of {TABLE_WIDTH_MULTIPLE} "
            f"columns, these have {widths}"
        )
    columns = [_columns_per_cta(width) for width in widths]
    pieces = [-(-width // c) for width, c in zip(widths, columns, strict=True)]
    num_entries = 1 if draft_tokens is None else 1 + draft_tokens.shape[1]
    token_ctas = -(-num_tokens // run)

    operands = _Refs(
        idx_mapping,
        query_start_loc,
        jnp.reshape(num_reqs, (1,)),
        counters,
        token_ids,
        num_blocks,
        draft_tokens,
        num_draft_tokens,
        tuple(block_tables),
    )
    leaves, structure = jax.tree.flatten(operands)

    def i32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    out_type = InputPrep(
        positions=i32(num_tokens),
        input_ids=i32(num_tokens),
        seq_lens=i32(batch),
        logits_indices=i32(batch * num_entries),
        block_table=tuple(i32(batch, width) for width in widths),
        slot_mapping=tuple(i32(num_tokens) for _ in widths),
    )
    out_leaves, out_structure = jax.tree.flatten(out_type)

    def input_prep_kernel(*flat):
        refs: _Refs = jax.tree.unflatten(structure, flat[: len(leaves)])
        out: InputPrep = jax.tree.unflatten(out_structure, flat[len(leaves) :])
        cta = lax.axis_index("cta")
        live_reqs = jnp.clip(refs.num_reqs[0], 0, batch)
        total = refs.query_start_loc[live_reqs]

        @compat.when(cta < token_ctas)
        def _():
            _prepare_tokens(refs, out, cta * run, run, live_reqs, total, block_sizes)

        first = token_ctas
        for g in range(len(widths)):

            @compat.when((cta >= first) & (cta < first + batch * pieces[g]))
            def _(g=g, first=first):
                item = cta - first
                b, piece = lax.div(item, jnp.int32(pieces[g])), lax.rem(item, jnp.int32(pieces[g]))
                request = _load_request(refs, b, live_reqs)
                _copy_table_row(refs, out, g, b, request, piece, columns[g])
                if g == 0:
                    compat.when(piece == 0)(lambda: _prepare_request(out, b, request, num_entries))

            first += batch * pieces[g]

    results = compat.kernel(
        input_prep_kernel,
        out_type=out_leaves,
        grid=(token_ctas + batch * sum(pieces),),
        grid_names=("cta",),
    )(*leaves)
    return jax.tree.unflatten(out_structure, results)


def _columns_per_cta(width: int) -> int:
    """A multiple of 128; the last piece of a row overlaps the one before where they do not divide it."""
    pieces = -(-width // COLUMNS_PER_CTA)
    return -(-width // (pieces * compat.LANES)) * compat.LANES


def _load_request(refs: _Refs, b, live_reqs) -> _Request:
    """Request b of the batch; nothing is looked up through the entries of padding."""
    live = b < live_reqs
    row = jnp.where(live, refs.idx_mapping[b], PARKING_ROW)
    drafts = refs.num_draft_tokens[b] if refs.num_draft_tokens is not None else jnp.int32(0)
    return _Request(
        live=live,
        row=row,
        start=refs.query_start_loc[b],
        end=refs.query_start_loc[b + 1],
        computed=refs.counters[row, NUM_COMPUTED],
        prefill_len=refs.counters[row, PREFILL_LEN],
        num_drafts=jnp.where(live, drafts, 0),
    )


def _prepare_tokens(refs: _Refs, out: InputPrep, first, run: int, live_reqs, total, block_sizes) -> None:
    """positions, input_ids and slot_mapping of tokens first .. first + run - 1."""
    num_tokens, batch, max_len = out.positions.shape[0], refs.idx_mapping.shape[0], refs.token_ids.shape[1]
    if run == 1 or num_tokens < WINDOW or min(block_sizes) < MIN_WINDOW_BLOCK_SIZE:
        return _prepare_run(refs, out, first, run, live_reqs, total, block_sizes)

    window = first - lax.rem(first, jnp.int32(WINDOW))
    request = _load_request(refs, find_request(refs.query_start_loc, live_reqs, window, batch), live_reqs)
    position = request.computed + window - request.start
    inside = window + WINDOW <= num_tokens
    padding = inside & (window >= total)
    known = inside & (window + WINDOW <= request.end) & (request.seq_len <= request.prefill_len)
    known &= (window < total) & (position + WINDOW <= max_len)
    leads = first == window

    @compat.when(leads & padding)
    def _():
        here = compat.ds(window, WINDOW)
        out.positions[here] = compat.full(WINDOW, 0)
        out.input_ids[here] = compat.full(WINDOW, 0)
        for slots in out.slot_mapping:
            slots[here] = compat.full(WINDOW, PAD_SLOT_ID)

    @compat.when(leads & known)
    def _():
        _prepare_window(refs, out, window, request.row, position, block_sizes)

    @compat.when(~(padding | known))
    def _():
        _prepare_run(refs, out, first, run, live_reqs, total, block_sizes)


def _prepare_window(refs: _Refs, out: InputPrep, window, row, position, block_sizes) -> None:
    """128 tokens of one chunk, all known: consecutive positions from `position`."""
    here, lane = compat.ds(window, WINDOW), compat.iota(WINDOW)
    ids = compat.load(refs.token_ids.at[row, compat.ds(position, WINDOW)], layout=compat.strided(WINDOW))
    all_blocks = []
    for g, size in enumerate(block_sizes):
        column = lax.div(position, jnp.int32(size))
        all_blocks.append([_block(refs, g, row, column + i) for i in range((WINDOW - 2) // size + 2)])
    out.positions[here] = lane + compat.full(WINDOW, position)
    out.input_ids[here] = ids
    for g, (size, blocks) in enumerate(zip(block_sizes, all_blocks, strict=True)):
        offset = lane + compat.full(WINDOW, lax.rem(position, jnp.int32(size)))
        base = compat.full(WINDOW, blocks[0] * size)
        for i, block in enumerate(blocks[1:], start=1):
            inside = offset >= compat.full(WINDOW, i * size)
            base = jnp.where(inside, compat.full(WINDOW, (block - i) * size), base)
        out.slot_mapping[g][here] = base + offset


def _prepare_run(refs: _Refs, out: InputPrep, first, run: int, live_reqs, total, block_sizes) -> None:
    """Any tokens, one by one."""
    num_tokens, batch = out.positions.shape[0], refs.idx_mapping.shape[0]
    tokens = [jnp.minimum(first + i, num_tokens - 1) for i in range(run)]
    requests = [
        _load_request(refs, b, live_reqs)
        for b in requests_of_run(refs.query_start_loc, live_reqs, total, tokens, batch)
    ]
    positions, ids, all_slots = [], [], []
    for token, request in zip(tokens, requests, strict=True):
        live = token < total
        position = jnp.where(live, request.computed + token - request.start, 0)
        positions.append(position)
        ids.append(jnp.where(live, _input_id(refs, request, token, position), 0))
        slots = []
        for g, size in enumerate(block_sizes):
            column, offset = lax.div(position, jnp.int32(size)), lax.rem(position, jnp.int32(size))
            slots.append(jnp.where(live, _block(refs, g, request.row, column) * size + offset, PAD_SLOT_ID))
        all_slots.append(slots)
    for i, token in enumerate(tokens):
        out.positions[token] = positions[i]
        out.input_ids[token] = ids[i]
        for g, slot in enumerate(all_slots[i]):
            out.slot_mapping[g][token] = slot


def _input_id(refs: _Refs, request: _Request, token, position):
    from_end, drafts = request.end - 1 - token, request.num_drafts
    decoding = request.seq_len > request.prefill_len
    takes_last = decoding & (from_end == drafts) & (request.seq_len - drafts - 1 >= request.prefill_len)
    known = refs.token_ids[request.row, jnp.minimum(position, refs.token_ids.shape[1] - 1)]
    result = jnp.where(takes_last, refs.counters[request.row, LAST_SAMPLED], known)
    if refs.draft_tokens is not None:
        column = jnp.clip(drafts - 1 - from_end, 0, refs.draft_tokens.shape[1] - 1)
        result = jnp.where(decoding & (from_end < drafts), refs.draft_tokens[request.row, column], result)
    return result


def _block(refs: _Refs, g: int, row, column):
    """Block in a column of a row's table; past the columns in use the null block."""
    table = refs.block_tables[g]
    block = table[row, jnp.minimum(column, table.shape[1] - 1)]
    return jnp.where(column < jnp.minimum(refs.num_blocks[row, g], table.shape[1]), block, NULL_BLOCK)


def _copy_table_row(refs: _Refs, out: InputPrep, g: int, b, request: _Request, piece, columns: int) -> None:
    source, target = refs.block_tables[g], out.block_table[g]
    start = jnp.minimum(piece * columns, source.shape[1] - columns)
    here = compat.ds(start, columns)
    used = jnp.where(request.live, refs.num_blocks[request.row, g], 0) - start

    @compat.when(used > 0)
    def _():
        blocks = compat.load(source.at[request.row, here], layout=compat.strided(columns))
        kept = compat.iota(columns) < compat.full(columns, used)
        target[b, here] = jnp.where(kept, blocks, compat.full(columns, NULL_BLOCK))

    @compat.when(used <= 0)
    def _():
        target[b, here] = compat.full(columns, NULL_BLOCK)


def _prepare_request(out: InputPrep, b, request: _Request, num_entries: int) -> None:
    out.seq_lens[b] = jnp.where(request.live, request.seq_len, 0)
    first, last = request.end - 1 - request.num_drafts, jnp.maximum(request.end - 1, 0)
    for i in range(num_entries):
        index = jnp.maximum(jnp.minimum(first + i, last), 0)
        out.logits_indices[b * num_entries + i] = jnp.where(request.live, index, 0)
