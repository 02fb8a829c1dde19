"""Staged block-table writes against a NumPy loop; junk past their number; two writes to one cell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.errors import InvariantError
from jaxrunner.state.block_tables import BlockTables, KVGroup
from jaxrunner.state.block_writes import apply_block_writes, check_block_writes, no_block_writes

ROWS, WIDTHS, CAPACITY = 5, (8, 16), 12
GROUPS = tuple(KVGroup((g,)) for g in range(len(WIDTHS)))
apply = jax.jit(apply_block_writes)


def random_tables(rng):
    block_table = tuple(jnp.asarray(rng.integers(1, 99, (ROWS, w)), jnp.int32) for w in WIDTHS)
    num_blocks = jnp.asarray(rng.integers(0, 9, (ROWS, len(WIDTHS))), jnp.int32)
    return BlockTables(block_table, num_blocks, GROUPS)


def random_writes(rng):
    cells = [(g, row, column) for g, width in enumerate(WIDTHS) for row in range(ROWS) for column in range(width)]
    chosen = rng.permutation(len(cells))[: rng.integers(0, CAPACITY + 1)]
    return np.array([(*cells[i], rng.integers(1, 99)) for i in chosen], np.int32).reshape(-1, 4)


def assert_tables(tables, block_table, num_blocks):
    for actual, expected in zip(tables.block_table, block_table, strict=True):
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(tables.num_blocks, num_blocks)


@pytest.mark.parametrize("seed", range(10))
def test_random_writes_equal_a_loop(seed):
    rng = np.random.default_rng(seed)
    tables, writes = random_tables(rng), random_writes(rng)
    block_table, num_blocks = [np.array(t) for t in tables.block_table], np.array(tables.num_blocks)
    for g, row, column, block in writes:
        block_table[g][row, column] = block
        num_blocks[row, g] = max(num_blocks[row, g], column + 1)
    padded = rng.integers(0, (2, ROWS, WIDTHS[0], 99), (CAPACITY, 4)).astype(np.int32)  # looks like more writes
    padded[rng.random(padded.shape) < 0.1] = rng.choice([-1, 2**31 - 1])
    padded[: len(writes)] = writes
    assert_tables(apply(tables, padded, jnp.int32(len(writes))), block_table, num_blocks)


def test_entries_past_the_count_are_ignored():
    """They look like writes in every way."""
    tables = random_tables(np.random.default_rng(0))
    writes = np.array([[0, 1, 2, 5], [0, 1, 3, 6], [1, 2, 15, 7]], np.int32)
    assert_tables(apply(tables, writes, jnp.int32(0)), tables.block_table, tables.num_blocks)
    after = apply(tables, writes, jnp.int32(1))
    expected = tables.block_table[0].at[1, 2].set(5), tables.block_table[1]
    assert_tables(after, expected, tables.num_blocks.at[1, 0].max(3))


def test_the_number_of_blocks_never_falls():
    tables = random_tables(np.random.default_rng(0)).replace(num_blocks=jnp.full((ROWS, 2), 6, jnp.int32))
    after = apply(tables, np.array([[0, 1, 2, 5], [1, 3, 9, 6]], np.int32), jnp.int32(2))
    assert after.num_blocks[1].tolist() == [6, 6]
    assert after.num_blocks[3].tolist() == [6, 10]


def test_the_same_writes_twice_change_nothing_more():
    rng = np.random.default_rng(0)
    tables = random_tables(rng)
    writes = np.array([[0, 1, 7, 5], [1, 4, 15, 6]], np.int32)
    once = apply(tables, writes, jnp.int32(2))
    twice = apply(once, writes, jnp.int32(2))
    assert_tables(twice, once.block_table, once.num_blocks)
    assert once.num_blocks[1, 0] == 8


def test_no_room_for_writes_is_no_change():
    tables = random_tables(np.random.default_rng(0))
    assert apply_block_writes(tables, jnp.zeros((0, 4), jnp.int32), jnp.int32(0)) is tables


def test_two_writes_to_one_cell_are_refused():
    check_block_writes(no_block_writes())
    check_block_writes(np.array([[0, 1, 2, 3], [0, 1, 3, 3], [1, 1, 2, 3], [0, 2, 2, 3]]))
    for block in (3, 4):
        with pytest.raises(InvariantError, match="same cell"):
            check_block_writes(np.array([[0, 1, 2, 3], [1, 1, 2, 3], [0, 1, 2, block]]))
