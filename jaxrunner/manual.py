"""Driving a state by hand: admit prompts, plan a step, reserve and release blocks, without an engine.

Each function takes a state and returns what it makes from it; which rows and blocks are free is read from the state
itself, so any state, also an old one, can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jaxrunner.compile.buckets import lowest_tier
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.forks import fork_request
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.stages.inputs import StepInput
from jaxrunner.state.admission import (
    ENTRIES_PER_CALL,
    AdmitEntry,
    admit_layout,
    apply_admit,
    entries_with_arrays,
    pack_admit,
    release_entry,
)
from jaxrunner.state.alive import check_alive
from jaxrunner.state.block_tables import NULL_BLOCK
from jaxrunner.state.block_writes import no_block_writes
from jaxrunner.state.fields import REQUEST_COLUMN
from jaxrunner.state.records import check_token_ids, request_record
from jaxrunner.state.reports import check_reports
from jaxrunner.state.request_arrays import check_extra_args, request_rows
from jaxrunner.state.request_lists import check_lists, list_writes
from jaxrunner.state.requests import PARKING_ROW
from jaxrunner.state.runner_state import RunnerState, host_view


def admit(
    state: RunnerState,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    vocab_size: int = 2**31 - 1,
    eos_token_ids: Sequence[int] = (),
) -> tuple[RunnerState, list[int]]:
    """(state with the prompts in it, the row of each). Greedy by default. `state` is not donated.

    prompts: token ids. params: one for all or one each; a missing seed becomes the row number. vocab_size: ids are
    checked against it. eos_token_ids: the model's, which min_tokens masks.
    Blocks for the prompts are taken; later ones come with `plan` or `reserve`.
    Raises AdmissionError for a prompt that cannot be run and CapacityError when rows or blocks run out.
    """
    check_alive(state)
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams(temperature=0.0)] * len(prompts)
    if len(each) != len(prompts):
        raise AdmissionError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
    view = _HostTables(state)
    rows = view.free_rows()
    if len(rows) < len(prompts):
        raise CapacityError(f"{len(prompts)} prompts but {len(rows)} free rows; release some or init_state with more")
    entries = []
    for prompt, request, row in zip(prompts, each, rows, strict=False):
        ids = check_token_ids(prompt, vocab_size)
        if len(ids) >= state.max_model_len:
            raise AdmissionError(f"a prompt of {len(ids)} tokens leaves no room in max_model_len {state.max_model_len}")
        if request.structured_outputs is not None:
            raise AdmissionError("by hand a grammar's mask is an argument of the step: step(..., grammar_bitmask=mask)")
        check_lists(
            request,
            eos_token_ids,
            vocab_size=vocab_size,
            sizes=state.sampling.sizes,
            has_thinking=state.sampling.thinking is not None,
            where=f"row {row}",
        )
        check_reports(request, state.sampling.reports, where=f"row {row}")
        if request.scores_prompt:
            raise AdmissionError(
                f"row {row}: prompt_logprobs come from a runner; by hand, keep the hidden states of the prompt's steps "
                "(return_hidden=True) and call jaxrunner.stages.prompt_logprobs.prompt_logprobs with them"
            )
        check_extra_args(request, state.sampling.custom, f"row {row}")
        record = request_record(
            prompt_len=len(ids), prefill_len=len(ids), num_computed_tokens=0, params=request, seed=row
        )
        view.num_blocks[row] = 0
        lists = list_writes(request, eos_token_ids, state.sampling.sizes)
        arrays = request_rows(request, state.sampling.custom, len(ids))
        entries.append(AdmitEntry(row, record, ids, view.cover(row, len(ids)), lists, arrays))
    return _apply(state, entries), rows[: len(prompts)]


def plan(state: RunnerState, num_tokens: Mapping[int, int]) -> StepInput:
    """The input of one step: row -> tokens to run, in batch order (1-token rows first is customary, not needed).

    Takes the blocks that these tokens need. Raises AdmissionError for a row that is not live or asked to run tokens
    it does not have, CapacityError when the blocks run out.
    """
    check_alive(state)
    view = _HostTables(state)
    writes = []
    for row, count in num_tokens.items():
        view.check_live(row)
        known = int(view.counters[row, REQUEST_COLUMN["total_len"]]) - view.computed(row)
        if not 1 <= count <= known:
            raise AdmissionError(f"row {row} has {known} token(s) to run, {count} were asked for")
        writes.append(view.cover(row, view.computed(row) + count))
    rows = np.fromiter(num_tokens, np.int32, len(num_tokens))
    return StepInput(
        idx_mapping=rows,
        num_scheduled_tokens=np.fromiter(num_tokens.values(), np.int32, len(num_tokens)),
        num_draft_tokens=np.zeros(len(rows), np.int32),
        groups=state.tables.groups,
        block_writes=np.concatenate(writes or [no_block_writes()]),
        num_draft_slots=state.num_draft_tokens,
        tier=lowest_tier(int(np.bitwise_or.reduce(host_view(state.sampling.features)[rows]))),
    )


def reserve(state: RunnerState, rows: Sequence[int], num_tokens: int) -> RunnerState:
    """The state with blocks for `num_tokens` more tokens in each row. `state` is not donated."""
    check_alive(state)
    view = _HostTables(state)
    entries = []
    for row in rows:
        view.check_live(row)
        end = int(view.counters[row, REQUEST_COLUMN["total_len"]]) + num_tokens
        if end > state.max_model_len:
            raise CapacityError(f"row {row} would reach {end} tokens; max_model_len is {state.max_model_len}")
        entries.append(AdmitEntry(row, block_writes=view.cover(row, end)))
    return _apply(state, entries)


def fork(
    state: RunnerState, src: int, n: int = 1, *, seeds: Sequence[int] | None = None, num_tokens: int = 0
) -> tuple[RunnerState, list[int]]:
    """(state with n copies of the request in row `src`, their rows). They share its full blocks.

    seeds: one for each copy; without them the copies draw what src draws (see `fork_request`). num_tokens: blocks for
    so many more tokens are reserved in src and in each copy. Raises CapacityError when rows or blocks run out.
    """
    check_alive(state)
    rows = _HostTables(state).free_rows()
    if len(rows) < n:
        raise CapacityError(f"{n} forks but {len(rows)} free rows; release some or init_state with more")
    forked = fork_request(state, [src] * n, rows[:n], seed=seeds) if n else state
    return reserve(forked, [src, *rows[:n]], num_tokens) if num_tokens else forked, rows[:n]


def release(state: RunnerState, rows: Sequence[int]) -> RunnerState:
    """The state without these requests: their rows are zeroed and their blocks are free. `state` is not donated."""
    check_alive(state)
    view = _HostTables(state)
    for row in rows:
        view.check_live(row)
    return _apply(state, [release_entry(row) for row in rows])


class _HostTables:
    """Host copies of the small arrays that say which rows and blocks are in use."""

    def __init__(self, state: RunnerState):
        self.groups = state.tables.groups
        self.counters = host_view(state.requests.counters)
        self.num_blocks = host_view(state.tables.num_blocks)
        self.total_len = self.counters[:, REQUEST_COLUMN["total_len"]]
        self._free = [self._free_blocks(state, g) for g in range(len(self.groups))]

    def _free_blocks(self, state: RunnerState, g: int) -> list[int]:
        """Allocator blocks that no live row holds, highest first, so that `pop` gives the lowest."""
        table, n = host_view(state.tables.block_table[g]), self.groups[g].blocks_per_kv_block
        held = np.arange(table.shape[1])[None, :] < self.num_blocks[:, g : g + 1]
        used = set((table[held] // n).tolist()) | {NULL_BLOCK}
        return [b for b in range(state.kv.blocks[g].shape[2] // n - 1, -1, -1) if b not in used]

    def free_rows(self) -> list[int]:
        return [row for row in range(PARKING_ROW + 1, len(self.total_len)) if self.total_len[row] == 0]

    def check_live(self, row: int) -> None:
        if not PARKING_ROW < row < len(self.total_len) or self.total_len[row] == 0:
            raise AdmissionError(f"row {row} holds no request; live rows are {np.flatnonzero(self.total_len).tolist()}")

    def computed(self, row: int) -> int:
        return int(self.counters[row, REQUEST_COLUMN["num_computed_tokens"]])

    def cover(self, row: int, num_tokens: int) -> np.ndarray:
        """Block writes that let `row` hold `num_tokens` tokens; takes the blocks."""
        writes: list[tuple[int, int, int, int]] = []
        for g, group in enumerate(self.groups):
            column = int(self.num_blocks[row, g])
            while column * group.block_size < num_tokens:
                if not self._free[g]:
                    raise CapacityError(f"no free KV block is left in group {g}; init_state with more num_blocks")
                block = self._free[g].pop()
                for k in range(group.blocks_per_kv_block):
                    writes.append((g, row, column, block * group.blocks_per_kv_block + k))
                    column += 1
            self.num_blocks[row, g] = column
        return np.array(writes, np.int32).reshape(-1, 4)


def _apply(state: RunnerState, entries: list[AdmitEntry]) -> RunnerState:
    custom = state.sampling.custom
    size = entries_with_arrays(custom) if custom else ENTRIES_PER_CALL
    for start in range(0, len(entries), size):
        part = entries[start : start + size]
        tokens, blocks = sum(len(e.tokens) for e in part), sum(len(e.block_writes) for e in part)
        lists = sum(len(e.list_writes) for e in part)
        layout = admit_layout(max(tokens, 1), blocks, num_list_writes=lists, custom=custom)
        state = apply_admit(state, jnp.asarray(pack_admit(layout, part)), layout=layout)
    return state
