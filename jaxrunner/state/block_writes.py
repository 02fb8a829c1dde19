"""Staged block-table writes: (group, row, column, block) entries, applied by one scatter a group.

Only differences travel. The host never stages two writes to one cell in one flush: their order would be undefined on
a GPU (`check_block_writes`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import InvariantError
from jaxrunner.state.block_tables import BlockTables

GROUP, ROW, COLUMN, BLOCK = range(4)


def no_block_writes() -> np.ndarray:
    return np.zeros((0, 4), np.int32)


def check_block_writes(writes: np.ndarray) -> None:
    """Raises InvariantError if two entries write the same cell."""
    if len(writes) < 2:
        return
    cells = writes[np.lexsort((writes[:, COLUMN], writes[:, ROW], writes[:, GROUP])), :BLOCK]
    if (cells[1:] == cells[:-1]).all(axis=1).any():
        raise InvariantError("two staged writes go to the same cell of a block table; merge them first")


def apply_block_writes(tables: BlockTables, writes: jax.Array, count: jax.Array) -> BlockTables:
    """Tables with the first `count` entries of `writes` (i32[N, 4]) written and `num_blocks` raised to match.

    Entries past `count` are sent out of range and dropped, whatever they hold.
    """
    if not writes.shape[0]:
        return tables
    live = jnp.arange(writes.shape[0]) < count
    rows_out = tables.num_blocks.shape[0]
    new_tables = []
    for g, table in enumerate(tables.block_table):
        row = jnp.where(live & (writes[:, GROUP] == g), writes[:, ROW], rows_out)
        new_tables.append(table.at[row, writes[:, COLUMN]].set(writes[:, BLOCK], mode="drop"))
    row = jnp.where(live, writes[:, ROW], rows_out)
    num_blocks = tables.num_blocks.at[row, writes[:, GROUP]].max(writes[:, COLUMN] + 1, mode="drop")
    return tables.replace(block_table=tuple(new_tables), num_blocks=num_blocks)
