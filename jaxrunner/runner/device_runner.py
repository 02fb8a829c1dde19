"""`DeviceRunner`: the only mutable object on the device path. It owns the state, the row map and the executables.

One step: the scheduler's differences become one packed upload, one executable runs (two for a ragged batch), one small
array comes back. Everything per request lives in the state on the device; the host keeps only the row of each request
and a few counts (`HostRows`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner.compile.buckets import Tier
from jaxrunner.compile.executable_cache import open_cache
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.compile.table import BucketTable
from jaxrunner.contract import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxrunner.errors import CapacityError, NotBuiltError
from jaxrunner.models.model import Model
from jaxrunner.runner.batch_order import sort_requests
from jaxrunner.runner.config import RunnerConfig, empty_state
from jaxrunner.runner.host_rows import HostRows
from jaxrunner.runner.output import AsyncOutput
from jaxrunner.runner.plan_checks import PlanChecks, block_moves
from jaxrunner.runner.rows import RowMap
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.stages.inputs import StepInput, block_write_capacity
from jaxrunner.stages.sample import StepOutput
from jaxrunner.stages.step import Pending
from jaxrunner.state.admission import ENTRIES_PER_CALL, AdmitEntry, pack_admit, release_entry
from jaxrunner.state.audit import audit
from jaxrunner.state.block_moves import MOVES_PER_CALL
from jaxrunner.state.block_writes import no_block_writes
from jaxrunner.state.records import derived_seed, request_record
from jaxrunner.state.request_lists import list_writes
from jaxrunner.state.runner_state import RunnerState


class Parked(NamedTuple):
    """A step between `execute_model` and `sample_tokens`. output is set when the whole step was launched."""

    req_ids: list[str]
    tier: Tier
    output: StepOutput | None
    pending: Pending | None
    num_logprobs: np.ndarray
    wants_mask: np.ndarray


class DeviceRunner:
    """model, weights: from `load`. ladder: `Ladder.default` for the configuration's sizes if not given.
    seed: requests without a seed of their own get one derived from it and their order of arrival.
    """

    def __init__(
        self, model: Model, weights: Any, config: RunnerConfig, *, ladder: Ladder | None = None, seed: int = 0
    ):
        self.model = model
        self.weights = weights
        self.config = config
        self.ladder = ladder or default_ladder(model, config)
        self.state: RunnerState = empty_state(model, config)
        self.groups = self.state.tables.groups
        programs = ProgramSet(model, weights, self.state, self.ladder, implementation=config.implementation)
        cache = open_cache(config.executable_cache)
        self.table: BucketTable[ProgramSet] = BucketTable(programs, policy=config.bucket_policy, cache=cache)
        self.rows = RowMap(config.max_num_seqs)
        widths = [table.shape[1] for table in self.state.tables.block_table]
        self._host = HostRows(config.max_num_seqs + 1, self.groups)
        self._checks = PlanChecks(model, config, self.groups, widths, self.ladder.max_num_tokens)
        self._seed = seed
        self._num_admitted = 0
        self._parked: Parked | None = None

    @staticmethod
    def programs_of(model: Model, weights: Any, config: RunnerConfig, ladder: Ladder) -> ProgramSet:
        """The programs of a runner of these sizes, from shapes alone. weights: arrays or shapes."""
        state = jax.eval_shape(lambda: empty_state(model, config))
        return ProgramSet(model, weights, state, ladder, implementation=config.implementation)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Apply the plan and launch its forward pass. Returns None, and `sample_tokens` completes the step; or, for
        a plan without tokens, the empty output of a step without a forward pass (its releases, admissions and staged
        writes have been applied).

        A plan that cannot be run raises AdmissionError or NotBuiltError before anything has changed. Raises
        RuntimeError if the previous step still waits for `sample_tokens`, and what ended a warm-up in the background.
        """
        self.table.check()
        if self._parked is not None:
            raise RuntimeError("execute_model was called twice; call sample_tokens first to complete the last step")
        self._checks.check(scheduler_output, self.rows.row_of, self._host)
        writes = self.update_states(scheduler_output)
        self._move_blocks(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            self._apply_admissions([AdmitEntry(row=0, block_writes=writes)] if len(writes) else [])
            return ModelRunnerOutput.with_kv_conn_output_only(None)
        req_ids, inputs = self.build_inputs(scheduler_output, writes)
        self._parked = self._launch(req_ids, inputs)
        if self.config.check_invariants:
            audit(self.state)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput:
        """Complete the step that `execute_model` launched. With async_scheduling the result is still on its way."""
        if self._parked is None:
            raise RuntimeError("sample_tokens without a step; call execute_model first")
        if grammar_output is not None:
            raise NotBuiltError("structured output is not built: no request of this step can need a grammar mask")
        parked, self._parked = self._parked, None
        output = parked.output
        if output is None:
            entry = self.table.get(self.table.programs.finish(len(parked.req_ids), parked.tier))
            self.state, output = self.table.call(entry, self.weights, self.state, parked.pending)
        result = AsyncOutput(parked.req_ids, output, parked.num_logprobs, parked.wants_mask)
        return result if self.config.async_scheduling else result.get_output()

    def warm_up(self, **options: Any) -> None:
        """Make the executables of the whole ladder, now or in the background; see `BucketTable.warm_up`."""
        self.table.warm_up(**options)

    def update_states(self, so: SchedulerOutput) -> np.ndarray:
        """Stage 0, on the host: free rows of finished and preempted requests, give rows to new ones, and return the
        block-table writes of known ones, i32[N, 4]. Rows that changed go up through the admit executable.
        """
        released = set()
        for req_id in sorted(so.finished_req_ids | (so.preempted_req_ids or set())):
            if (row := self.rows.remove(req_id)) is not None:
                released.add(row)
        entries = []
        for request in so.scheduled_new_reqs:
            if (row := self.rows.remove(request.req_id)) is not None:
                released.add(row)
            entry = self._admit_entry(request)
            released.discard(entry.row)
            entries.append(entry)
        for row in released:
            self._host.clear(row)
        self._apply_admissions([release_entry(row) for row in sorted(released)] + entries)
        grown = so.scheduled_cached_reqs.with_new_blocks()
        writes = [self._host.append_blocks(self.rows[req_id], blocks) for req_id, blocks in grown]
        return np.concatenate(writes or [no_block_writes()])

    def build_inputs(self, so: SchedulerOutput, block_writes: np.ndarray) -> tuple[list[str], StepInput]:
        """(request ids in batch order, the step's input)."""
        req_ids, counts = sort_requests(so.num_scheduled_tokens, self.ladder.query_len)
        rows = self.rows.take(req_ids)
        inputs = StepInput(
            idx_mapping=rows,
            num_scheduled_tokens=counts,
            num_draft_tokens=np.zeros(len(rows), np.int32),
            groups=self.groups,
            block_writes=block_writes,
            tier=self._host.tier_of(rows),
        )
        return req_ids, inputs

    def audit(self, *, shared_blocks: bool = False) -> None:
        """Raises InvariantError if the state breaks an invariant; see `jaxrunner.state.audit`."""
        audit(self.state, shared_blocks=shared_blocks)

    def _launch(self, req_ids: list[str], inputs: StepInput) -> Parked:
        programs, bucket = self.table.programs, self.ladder.pick(inputs)
        if len(inputs.block_writes) > block_write_capacity(bucket, self.groups):
            self._apply_admissions([AdmitEntry(row=0, block_writes=inputs.block_writes)])
            inputs = dataclasses.replace(inputs, block_writes=no_block_writes())
        entry = self.table.get(programs.first(bucket), real_tokens=inputs.num_tokens)
        assert entry.program.bucket is not None
        upload = inputs.pack(entry.program.bucket)
        self.state, result = self.table.call(entry, self.weights, self.state, upload)
        fused = entry.program.kind == "step"
        self._host.advance(inputs.idx_mapping, inputs.num_scheduled_tokens)
        rows = inputs.idx_mapping
        reports = self._host.num_logprobs[rows], self._host.wants_mask(rows)
        return Parked(req_ids, inputs.tier, result if fused else None, None if fused else result, *reports)

    def _apply_admissions(self, entries: list[AdmitEntry]) -> None:
        programs = self.table.programs
        while entries:
            count, program = _admission_call(entries, programs)
            entry = self.table.get(program)
            upload = pack_admit(programs.admit_layout(entry.program), entries[:count])
            self.state = self.table.call(entry, self.state, upload)
            entries = entries[count:]

    def _move_blocks(self, so: SchedulerOutput) -> None:
        """Zero and copy whole blocks, before the forward pass."""
        if not (so.new_block_ids_to_zero or so.kv_cache_block_copies):
            return
        entry = self.table.get(Program("moves", size=MOVES_PER_CALL))
        for upload in block_moves(so, self.config):
            self.state = self.table.call(entry, self.state, upload)

    def _admit_entry(self, request: NewRequestData) -> AdmitEntry:
        row = self.rows.add(request.req_id)
        params = request.sampling_params or SamplingParams()
        assert request.prompt_token_ids is not None
        tokens = np.array(request.prefill_token_ids or request.prompt_token_ids, np.int32)
        record = request_record(
            prompt_len=len(request.prompt_token_ids),
            prefill_len=len(tokens),
            num_computed_tokens=request.num_computed_tokens,
            params=params,
            seed=self._next_seed(),
        )
        self._host.occupy(row, len(tokens), request.num_computed_tokens, params)
        lists = list_writes(params, self.model.eos_token_ids, self.config.list_sizes)
        return AdmitEntry(row, record, tokens, self._host.append_blocks(row, request.block_ids), lists)

    def _next_seed(self) -> int:
        self._num_admitted += 1
        return derived_seed(self._seed, self._num_admitted)


def default_ladder(model: Model, config: RunnerConfig) -> Ladder:
    """The ladder of a runner that was given none."""
    return Ladder.default(model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)


def _admission_call(entries: list[AdmitEntry], programs: ProgramSet) -> tuple[int, Program]:
    """(how many of the first entries one call takes, the program for them)."""
    count = tokens = blocks = lists = 0
    program = None
    for entry in entries[:ENTRIES_PER_CALL]:
        tokens, blocks = tokens + len(entry.tokens), blocks + len(entry.block_writes)
        lists += len(entry.list_writes)
        fitting = programs.admit_for(tokens, blocks, lists)
        if fitting is None:
            break
        count, program = count + 1, fitting
    if program is None:
        raise CapacityError(f"{tokens} tokens and {blocks} blocks of one request do not fit the admit executables")
    return count, program
