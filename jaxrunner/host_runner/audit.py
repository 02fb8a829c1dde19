"""`audit_rows`: the invariants of a dense batch. For tests, debugging and idle moments."""

from __future__ import annotations

import numpy as np

from jaxrunner.errors import InvariantError
from jaxrunner.host_runner.dense_batch import DenseBatch
from jaxrunner.host_runner.input_arrays import HostSizes
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.state.block_tables import NULL_BLOCK


def audit_rows(batch: DenseBatch, sizes: HostSizes, config: RunnerConfig, *, shared_blocks: bool = False) -> None:
    """Raises InvariantError, naming the row, if one of these does not hold:

    rows 0..N-1 hold the requests that the map names, rows behind are empty; lengths are ordered (prompt <= prefill <=
    known, computed < known); blocks cover the computed tokens and lie in the pool; no block belongs to two places. With
    `shared_blocks`, rows may share one at the same column.
    """
    _check_dense(batch)
    rows = batch.rows
    for row in range(batch.num_reqs):
        lengths = {name: int(getattr(rows, name)[row]) for name in ("prompt_len", "prefill_len", "known", "computed")}
        prompt, prefill, known, computed = lengths.values()
        if not (0 < prompt <= prefill <= known <= sizes.max_model_len + 1 and 0 <= computed < known):
            raise InvariantError(f"lengths of row {row} are out of order: {lengths}")
        if known > prefill and known != computed + 1:
            raise InvariantError(f"row {row} has sampled, so known must be computed + 1: {lengths}")
    for g, group in enumerate(sizes.groups):
        table, held = rows.block_table[: batch.num_reqs, sizes.columns[g]], rows.num_blocks[: batch.num_reqs, g]
        _check_blocks(table, held, config.num_blocks * group.blocks_per_kv_block, shared_blocks)
        if (short := np.flatnonzero(held * group.block_size < rows.computed[: batch.num_reqs])).size:
            raise InvariantError(f"row {short[0]} has computed more tokens than its {held[short[0]]} blocks hold")


def _check_dense(batch: DenseBatch) -> None:
    held = batch.rows.req_ids[: batch.num_reqs].tolist()
    if batch.row_of != {req_id: row for row, req_id in enumerate(held)}:
        raise InvariantError(f"rows hold {held}, but the map says {batch.row_of}")
    for field in batch.rows.fields:
        behind = getattr(batch.rows, field.name)[batch.num_reqs :]
        if field.used is None and (behind != field.empty).any():
            raise InvariantError(f"{field.name} of a row behind the batch is not empty")


def _check_blocks(table: np.ndarray, held: np.ndarray, pool: int, shared_blocks: bool) -> None:
    in_use = np.arange(table.shape[1]) < held[:, None]
    blocks = table[in_use]
    if blocks.size and not (blocks.min() > NULL_BLOCK and blocks.max() < pool):
        raise InvariantError(f"a row holds a block outside 1..{pool - 1}")
    columns = np.broadcast_to(np.arange(table.shape[1]), table.shape)[in_use]
    # One place a block; where sharing is allowed, one column a block.
    places = np.unique(np.stack([blocks, columns]), axis=1) if shared_blocks else blocks[None]
    ids, uses = np.unique(places[0], return_counts=True)
    if (uses > 1).any():
        raise InvariantError(f"block {ids[uses.argmax()]} belongs to two places")
