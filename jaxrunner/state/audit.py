"""`audit`: the invariants of a state, checked on the host. For tests, debugging and idle moments."""

from __future__ import annotations

import numpy as np

from jaxrunner.errors import InvariantError
from jaxrunner.state.alive import check_alive
from jaxrunner.state.block_tables import NULL_BLOCK
from jaxrunner.state.fields import REQUEST_COLUMN
from jaxrunner.state.requests import PARKING_ROW
from jaxrunner.state.runner_state import RunnerState, host_view


def audit(state: RunnerState, *, shared_blocks: bool = False) -> None:
    """Raises InvariantError, naming the row and the numbers, if one of these does not hold:

    the parking row is zero in every per-row array; lengths are ordered (prompt <= prefill <= total, computed < total);
    total_len == num_computed + 1 once the prefill is done; a row's blocks cover its computed tokens; no live block is
    the null block or outside the pool; no block belongs to two places. With `shared_blocks`, rows may share a block
    that is full in all of them, at the same column and behind equal tokens.
    """
    check_alive(state)
    counters = host_view(state.requests.counters)
    _check_parking_row(state, counters)
    for row in np.flatnonzero(counters[:, REQUEST_COLUMN["total_len"]]):
        _check_lengths(int(row), {name: int(counters[row, c]) for name, c in REQUEST_COLUMN.items()}, state)
    for g in range(len(state.tables.groups)):
        _check_blocks(state, g, shared_blocks)


def _check_parking_row(state: RunnerState, counters: np.ndarray) -> None:
    arrays = {
        "requests.counters": counters,
        "requests.token_ids": state.requests.token_ids,
        "sampling.params": state.sampling.params,
        "sampling.lists": state.sampling.lists,
        "tables.num_blocks": state.tables.num_blocks,
        **{f"tables.block_table[{g}]": t for g, t in enumerate(state.tables.block_table)},
        **{f"extras[{name!r}]": value for name, value in state.extras.items()},
    }
    if state.requests.draft_tokens is not None:
        arrays["requests.draft_tokens"] = state.requests.draft_tokens
    for name, array in arrays.items():
        if host_view(array[PARKING_ROW]).any():
            raise InvariantError(f"the parking row of {name} is not zero: a padded row wrote to it")


def _check_lengths(row: int, c: dict[str, int], state: RunnerState) -> None:
    ordered = 0 < c["prompt_len"] <= c["prefill_len"] <= c["total_len"] <= state.max_model_len + 1
    if not (ordered and 0 <= c["num_computed_tokens"] < c["total_len"]):
        raise InvariantError(f"lengths of row {row} are out of order: {c}")
    sampled = c["total_len"] > c["prefill_len"]
    if sampled and c["total_len"] != c["num_computed_tokens"] + 1:
        raise InvariantError(f"row {row} has sampled, so total_len must be num_computed_tokens + 1: {c}")


def _check_blocks(state: RunnerState, g: int, shared_blocks: bool) -> None:
    group = state.tables.groups[g]
    table, num_blocks = host_view(state.tables.block_table[g]), host_view(state.tables.num_blocks[:, g])
    computed = host_view(state.requests.num_computed_tokens)
    short = np.flatnonzero(num_blocks * group.block_size < computed)
    if short.size:
        raise InvariantError(f"row {short[0]} computed {computed[short[0]]} tokens with {num_blocks[short[0]]} blocks")
    held = table[np.arange(table.shape[1])[None, :] < num_blocks[:, None]]
    pool = state.kv.blocks[g].shape[2]
    if held.size and not (held.min() > NULL_BLOCK and held.max() < pool):
        raise InvariantError(f"group {g} holds a block outside 1..{pool - 1}")
    ids, uses = np.unique(held, return_counts=True)
    if not shared_blocks and (uses > 1).any():
        raise InvariantError(f"a block of group {g} belongs to two places")
    for block in ids[uses > 1]:
        in_use = np.arange(table.shape[1])[None, :] < num_blocks[:, None]
        _check_shared(state, g, int(block), np.argwhere((table == block) & in_use), computed)


def _check_shared(state: RunnerState, g: int, block: int, places: np.ndarray, computed: np.ndarray) -> None:
    """places: (row, column) of each use of `block`."""
    where = f"block {block} of group {g}, shared by rows {places[:, 0].tolist()},"
    column = int(places[0, 1])
    if (places[:, 1] != column).any():
        raise InvariantError(f"{where} is at columns {places[:, 1].tolist()}: it would hold two positions")
    end = (column + 1) * state.tables.groups[g].block_size
    if (part := places[computed[places[:, 0]] < end, 0]).size:
        raise InvariantError(f"{where} ends at token {end}, but row {part[0]} computed {computed[part[0]]}: not full")
    first, *others = (host_view(state.requests.token_ids[row, :end]) for row in places[:, 0])
    if any((first != other).any() for other in others):
        raise InvariantError(f"{where} holds tokens 0..{end - 1} of rows whose tokens differ")
