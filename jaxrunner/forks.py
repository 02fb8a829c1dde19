"""Forks. `fork_request`: a row becomes a copy of another one and shares its KV. `fork_state`: a copy of everything.

A forked request shares every full KV block with its source: both block tables name it, and nobody writes a full block
again. Only the block that is still being filled, the tail, is copied. There are no reference counts to keep: a block
is in use while some row's table names it, so releasing one of the sharers leaves it to the others.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.device_memory import free_device_bytes
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.state.alive import check_alive
from jaxrunner.state.block_tables import NULL_BLOCK, KVGroup
from jaxrunner.state.fields import NUM_COMPUTED, SAMPLING_COLUMN, TOTAL_LEN, split_seed
from jaxrunner.state.requests import PARKING_ROW
from jaxrunner.state.runner_state import RunnerState, host_view

SEED = slice(SAMPLING_COLUMN["seed_lo"], SAMPLING_COLUMN["seed_hi"] + 1)
Rows = int | Sequence[int] | np.ndarray | jax.Array
logger = logging.getLogger("jaxrunner")


def fork_request(
    state: RunnerState, src: Rows, dst: Rows, *, seed: int | Sequence[int] | jax.Array | None = None
) -> RunnerState:
    """The state in which row `dst` is a copy of row `src`: history, counters, sampling parameters, extras and KV.

    src, dst: a row or equally many rows, as numbers or arrays (i32[k]), traced ones included: the function is pure and
    may stand in a user's jit or scan. All pairs are read before any is written, so `fork_request(state, parents,
    rows)` is the reordering of a beam search. What dst held before is dropped; the blocks it had reserved past the
    end of src stay its own, and where it has none for the tail (or has lent it to others) a free one is taken.
    Room for more tokens is given by `jaxrunner.reserve`, before a compiled loop, not in it.

    seed: by default a fork is a copy in everything, so that with the same seed it draws the same continuation. Give
    a new seed for each dst (64-bit numbers; or i32/u32[k] low words or [k, 2] low and high words, which may be traced).

    `state` is not donated; in your own jit with donate_argnames="state" no KV is copied but the tail blocks.
    Outside of a trace a wrong row raises AdmissionError and a missing block CapacityError. Inside one nothing can be
    raised: a pair whose dst is the parking row 0 or whose src holds no request does nothing (a way to fork under a
    condition), and a dst for whose tail no block is free becomes an empty row, which `decode_loop` leaves alone.
    Two pairs must not have the same dst.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, src, dst, seed)))
    words = None if seed is None else _seed_words(seed)
    if traced:
        sources, targets = jnp.broadcast_arrays(_vector(src), _vector(dst))
        return _fork(state, sources, targets, words)[0]
    check_alive(state)
    given, wanted = np.broadcast_arrays(np.atleast_1d(host_view(src)), np.atleast_1d(host_view(dst)))
    _check_pairs(state, given, wanted, words)
    # A few sizes serve all numbers of pairs: padding goes to the parking row, which does nothing.
    padding = (0, (1 << (len(wanted) - 1).bit_length()) - len(wanted))
    if words is not None:
        words = jnp.pad(words, (padding, (0, 0)))
    sources, targets = (jnp.asarray(np.pad(rows, padding).astype(np.int32)) for rows in (given, wanted))
    forked, enough = _compiled_fork(state, sources, targets, words)
    if isinstance(enough, jax.core.Tracer):  # a trace whose every argument is a constant
        return forked
    lacking = np.flatnonzero(~np.asarray(enough)[: len(wanted)])
    if lacking.size:
        raise CapacityError(
            f"no free KV block is left for the tail of row {given[lacking[0]]}, to be copied for row "
            f"{wanted[lacking[0]]}; release rows that are done, or init_state with more num_blocks"
        )
    return forked


def fork_state(state: RunnerState, *, bytes_limit: int | None = None) -> RunnerState:
    """A copy of the whole state, KV cache included, in new arrays: it outlives a donation of the original.

    How many bytes were copied is logged. bytes_limit: most bytes that may be copied to one device; by default what
    the device says is free (no limit where it says nothing, as the CPU does). Raises CapacityError, with the bytes,
    before anything is copied. To try variants of a few requests, `fork_request` costs far less.
    """
    check_alive(state)
    needed: dict[jax.Device, int] = defaultdict(int)
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            needed[shard.device] += shard.data.nbytes
    for device, size in needed.items():
        free = bytes_limit if bytes_limit is not None else free_device_bytes(device)
        if free is not None and size > free:
            raise CapacityError(
                f"a copy of this state takes {size} bytes on {device} (KV cache: {state.kv.nbytes}) but {free} are "
                "free; fork single requests with fork_request, or write it to a file with save_state"
            )
    logger.info("fork_state copies %d bytes, %d of them KV cache", sum(needed.values()), state.kv.nbytes)
    return jax.tree.map(jnp.copy, state)


class _Tables(NamedTuple):
    """One group's part of a fork of k pairs: the new rows of the table, their columns in use, what to copy."""

    table: jax.Array  # i32[k, W]
    num_blocks: jax.Array  # i32[k]
    copy_from: jax.Array  # i32[k, n], kernel blocks of the tail
    copy_to: jax.Array  # i32[k, n], out of range where nothing is copied
    enough: jax.Array  # bool[k], the tail has a block


def _fork(state: RunnerState, src: jax.Array, dst: jax.Array, seed: jax.Array | None) -> tuple[RunnerState, jax.Array]:
    """(the state after the fork, bool[k]: whether the blocks sufficed or the pair does nothing)."""
    num_rows = state.requests.num_rows
    exists = (src > PARKING_ROW) & (src < num_rows) & (dst > PARKING_ROW) & (dst < num_rows)
    src = jnp.where(exists, src, PARKING_ROW)
    runs = exists & (state.requests.counters[src, TOTAL_LEN] > 0)
    dst = jnp.where(runs, dst, num_rows)  # out of range: dropped by every write below
    parts = [_fork_tables(state, g, src, dst, runs) for g in range(len(state.tables.groups))]
    enough = functools.reduce(jnp.logical_and, (part.enough for part in parts))

    def copied(array: jax.Array) -> jax.Array:
        keep = enough.reshape(-1, *[1] * (array.ndim - 1))
        return array.at[dst].set(jnp.where(keep, array[src], jnp.zeros_like(array, shape=())), mode="drop")

    sampling = jax.tree.map(copied, state.sampling)
    if seed is not None:
        row = jnp.where(enough, dst, num_rows)[:, None]
        columns = jnp.arange(SEED.start, SEED.stop)
        sampling = sampling.replace(params=sampling.params.at[row, columns].set(seed, mode="drop"))
    num_blocks = jnp.where(enough[:, None], jnp.stack([part.num_blocks for part in parts], axis=1), 0)
    tables = state.tables.replace(
        block_table=tuple(
            table.at[dst].set(jnp.where(enough[:, None], part.table, NULL_BLOCK), mode="drop")
            for table, part in zip(state.tables.block_table, parts, strict=True)
        ),
        num_blocks=state.tables.num_blocks.at[dst].set(num_blocks, mode="drop"),
    )
    caches = []
    for cache, part in zip(state.kv.blocks, parts, strict=True):
        target = jnp.where(enough[:, None], part.copy_to, cache.shape[2])
        caches.append(cache.at[:, :, target].set(cache[:, :, part.copy_from], mode="drop"))
    forked = state.replace(
        requests=jax.tree.map(copied, state.requests),
        tables=tables,
        sampling=sampling,
        kv=state.kv.replace(blocks=tuple(caches)),
        extras=jax.tree.map(copied, state.extras),
    )
    return forked, enough | ~runs


_compiled_fork = jax.jit(_fork)


def _fork_tables(state: RunnerState, g: int, src: jax.Array, dst: jax.Array, runs: jax.Array) -> _Tables:
    """The fork of one group's tables, counted in allocator blocks: these are what is shared, kept, or taken.

    Of dst's columns, those before `full` become src's. From there on dst keeps each block that no other row names;
    for the tail, and where a block of dst was lent to others by an earlier fork, a free block is taken.
    """
    group, table = state.tables.groups[g], state.tables.block_table[g]
    n, pool = group.blocks_per_kv_block, state.kv.blocks[g].shape[2] // group.blocks_per_kv_block
    blocks = table[:, ::n] // n
    column = jnp.arange(blocks.shape[1])
    held = column * n < state.tables.num_blocks[:, g : g + 1]
    computed = state.requests.counters[src, NUM_COMPUTED]
    full, has_tail = computed // group.kv_block_size, computed % group.kv_block_size > 0

    shared = (column < full[:, None]) & runs[:, None]
    tail = (column == full[:, None]) & (has_tail & runs)[:, None]
    had = held.at[dst].get(mode="fill", fill_value=False) & runs[:, None]
    own = blocks.at[dst].get(mode="fill", fill_value=NULL_BLOCK)
    wanted = ~shared & (had | tail)

    others = held.at[dst].set(False, mode="drop")
    used = jnp.zeros(pool, bool).at[NULL_BLOCK].set(True)
    used = used.at[jnp.where(others, blocks, pool)].set(True, mode="drop")
    used = used.at[jnp.where(shared, blocks[src], pool)].set(True, mode="drop")
    # Two of the dst rows may name one block; the first of them keeps it.
    own = jnp.where(wanted & had & ~used[own], own, pool)
    order = jnp.arange(own.size).reshape(own.shape)
    first = jnp.full(pool, own.size).at[own].min(order, mode="drop")
    kept = (own < pool) & (first.at[own].get(mode="fill", fill_value=-1) == order)
    used = used.at[jnp.where(kept, own, pool)].set(True, mode="drop")

    free = jnp.nonzero(~used, size=pool, fill_value=NULL_BLOCK)[0].astype(jnp.int32)
    number = _numbered(wanted & ~kept, tail)
    taken = (number >= 0) & (number < pool - jnp.sum(used))
    new = jnp.where(shared, blocks[src], jnp.where(kept, own, jnp.where(taken, free[number], NULL_BLOCK)))
    # Columns up to the first one that could not be had.
    length = jnp.sum(jnp.cumprod(shared | kept | taken, axis=1), axis=1)
    enough = length >= full + has_tail
    new = jnp.where(column < length[:, None], new, NULL_BLOCK)
    new_table = _kernel_blocks(new, group)[:, : table.shape[1]]

    tail_columns = full[:, None] * n + jnp.arange(n)
    copy_from = jnp.take_along_axis(table[src], tail_columns, axis=1, mode="fill", fill_value=NULL_BLOCK)
    copy_to = jnp.take_along_axis(new_table, tail_columns, axis=1, mode="fill", fill_value=NULL_BLOCK)
    copy_to = jnp.where((has_tail & runs)[:, None], copy_to, state.kv.blocks[g].shape[2])
    num_blocks = jnp.minimum(length * n, table.shape[1]).astype(jnp.int32)
    return _Tables(new_table, num_blocks, copy_from, copy_to, enough)


def _numbered(needed: jax.Array, first: jax.Array) -> jax.Array:
    """0, 1, 2, ... at the entries of `needed`, those that are also `first` before the others; -1 elsewhere."""
    early, late = needed & first, needed & ~first
    count = jnp.cumsum(early).reshape(needed.shape) - 1
    # Column by column, so that rows run out of blocks together.
    rest = jnp.sum(early) + jnp.cumsum(late.T).reshape(needed.T.shape).T - 1
    return jnp.where(early, count, jnp.where(late, rest, -1))


def _kernel_blocks(blocks: jax.Array, group: KVGroup) -> jax.Array:
    """Allocator blocks [k, C] -> kernel blocks [k, C * n], the null block staying one null block."""
    n = group.blocks_per_kv_block
    expanded = jnp.where((blocks == NULL_BLOCK)[..., None], NULL_BLOCK, blocks[..., None] * n + jnp.arange(n))
    return expanded.reshape(len(blocks), -1).astype(jnp.int32)


def _vector(rows: Any) -> jax.Array:
    return jnp.atleast_1d(jnp.asarray(rows, jnp.int32))


def _seed_words(seed: Any) -> jax.Array:
    """i32[k, 2], low and high words."""
    if isinstance(seed, int | np.integer):
        return jnp.asarray([split_seed(int(seed))], jnp.int32)
    if isinstance(seed, Sequence):
        return jnp.asarray([split_seed(int(s)) for s in seed], jnp.int32).reshape(-1, 2)
    words = jnp.atleast_1d(jnp.asarray(seed))
    if words.dtype not in (jnp.int32, jnp.uint32):
        raise AdmissionError(f"an array of seeds holds 32-bit words, got {words.dtype}; give 64-bit seeds as numbers")
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    return words if words.ndim == 2 else jnp.stack([words, jnp.zeros_like(words)], axis=1)


def _check_pairs(state: RunnerState, src: np.ndarray, dst: np.ndarray, seed: jax.Array | None) -> None:
    # Also in a trace whose every argument is a constant.
    total_len = host_view(state.requests.counters)[:, TOTAL_LEN]
    last = len(total_len) - 1
    for row in dst:
        if not PARKING_ROW < row <= last:
            raise AdmissionError(f"row {row} cannot become a fork; rows are 1..{last}")
    for row in src:
        if not PARKING_ROW < row <= last or total_len[row] == 0:
            raise AdmissionError(f"row {row} holds no request; live rows are {np.flatnonzero(total_len).tolist()}")
    if len(set(dst.tolist())) != len(dst):
        raise AdmissionError(f"a row becomes a fork twice: {dst.tolist()}")
    if seed is not None and len(seed) != len(dst):
        raise AdmissionError(f"{len(seed)} seed(s) for {len(dst)} fork(s); give one to each")
