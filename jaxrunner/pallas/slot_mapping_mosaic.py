"""Slot mapping as one Mosaic GPU kernel, bit-equal to `slot_mapping_xla`.

A CTA takes a run of tokens. It finds the request of the first by a search with 7 independent loads a level (a binary
search would wait for memory three times as often), walks on from there, and loads all tokens' table entries before it
stores any slot, so that their latencies overlap.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.slot_mapping import locate
from jaxrunner.state.block_tables import NULL_BLOCK, PAD_SLOT_ID

FANOUT = 8
"""Parts into which a level of the search divides its interval."""
RESIDENT_CTAS = 1024
"""CTAs worth launching for tokens: about half of what an H200 holds at a time."""
MAX_TOKENS_PER_CTA = 8
"""Tokens whose loads one CTA keeps in flight."""


def default_tokens_per_cta(num_tokens: int) -> int:
    """1 for decode batches, more for long prefills; a power of two."""
    tokens = 1
    while tokens < MAX_TOKENS_PER_CTA and tokens * RESIDENT_CTAS < num_tokens:
        tokens *= 2
    return tokens


def slot_mapping_mosaic(
    query_start_loc: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    *,
    block_size: int,
    blocks_per_kv_block: int,
    cp_world_size: int,
    cp_rank: int,
    cp_interleave: int,
    tokens_per_cta: int | None = None,
) -> jax.Array:
    """See `slot_mapping`. query_start_loc: i32[B + 1], positions: i32[T], block_table: i32[B, W] -> i32[T].

    tokens_per_cta: tokens of a CTA, all unrolled; by default chosen from T. Raises ImplementationError where Mosaic
    GPU kernels cannot run.
    """
    num_tokens, (batch, width) = positions.shape[0], block_table.shape
    run = tokens_per_cta or default_tokens_per_cta(num_tokens)

    def slot_mapping_kernel(bounds_ref, positions_ref, table_ref, slots_ref):
        first = lax.axis_index("cta") * run
        tokens = [jnp.minimum(first + i, num_tokens - 1) for i in range(run)]
        last_bound = bounds_ref[batch]
        requests = requests_of_run(bounds_ref, jnp.int32(batch), last_bound, tokens, batch)
        loaded = [positions_ref[token] for token in tokens]
        slots = []
        for token, request, position in zip(tokens, requests, loaded, strict=True):
            live = token < last_bound
            position = jnp.where(live, position, 0).astype(jnp.uint32)
            column, offset, local = locate(
                position, block_size, blocks_per_kv_block, cp_world_size, cp_rank, cp_interleave
            )
            column = column.astype(jnp.int32)
            block = table_ref[request, jnp.minimum(column, width - 1)]
            block = jnp.where(column < width, block, NULL_BLOCK)
            slots.append(jnp.where(live & local, block * block_size + offset.astype(jnp.int32), PAD_SLOT_ID))
        for token, slot in zip(tokens, slots, strict=True):
            slots_ref[token] = slot

    return compat.kernel(
        slot_mapping_kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        grid=(-(-num_tokens // run),),
        grid_names=("cta",),
    )(query_start_loc, positions, block_table)


def find_request(bounds_ref, num_reqs, token, batch: int):
    """In a kernel: largest r < num_reqs with bounds[r] <= token. A token of padding gets some r inside the batch.

    bounds_ref: i32[batch + 1]; entries past num_reqs are garbage. They are loaded all the same, so that the first level
    need not wait for num_reqs.
    """
    low, step = jnp.int32(0), 1
    while step * FANOUT < batch:
        step *= FANOUT
    while step and batch > 1:
        indices = [low + k * step for k in range(1, FANOUT)]
        pivots = [bounds_ref[jnp.minimum(index, batch)] for index in indices]
        below = [(i <= num_reqs) & (pivot <= token) for i, pivot in zip(indices, pivots, strict=True)]
        low += step * sum(b.astype(jnp.int32) for b in below)
        step //= FANOUT
    return jnp.minimum(low, batch - 1)


def requests_of_run(bounds_ref, num_reqs, last_bound, tokens, batch: int) -> list:
    """In a kernel: the request of each of some ascending tokens, padding excepted, see `find_request`."""
    requests = [find_request(bounds_ref, num_reqs, tokens[0], batch)]
    if len(tokens) == 1:
        return requests

    def bound_after(request):
        return bounds_ref[jnp.minimum(request + 1, num_reqs)]

    request, bound = requests[0], bound_after(requests[0])
    for token in tokens[1:]:
        request, bound = lax.while_loop(
            lambda s, token=token: (s[1] <= token) & (token < last_bound),
            lambda s: (s[0] + 1, bound_after(s[0] + 1)),
            (request, bound),
        )
        requests.append(request)
    return requests
