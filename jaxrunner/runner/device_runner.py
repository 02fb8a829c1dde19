"""`DeviceRunner`: the only mutable object on the device path. It owns the state, the row map and the executables.

One step: the scheduler's differences become one packed upload, one executable runs (two for a ragged batch), one small
array comes back. Everything per request lives in the state on the device; the host keeps only the row of each request
and a few counts (`HostRows`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.executable_cache import open_cache
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import COPY, Program, ProgramSet
from jaxrunner.compile.table import BucketTable
from jaxrunner.contract import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.models.model import Model
from jaxrunner.runner.batch_order import batch_order
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.config import RunnerConfig, empty_state
from jaxrunner.runner.grammar import GrammarMasks, check_grammar_output
from jaxrunner.runner.host_rows import HostRows, RowFacts
from jaxrunner.runner.kept_arrays import KeptArrays
from jaxrunner.runner.output import Asked, AsyncOutput, BatchIds
from jaxrunner.runner.plan_checks import PlanChecks, block_moves
from jaxrunner.runner.plan_columns import CheckedPlan, PlanColumns
from jaxrunner.runner.prompt_reports import AskedTokens, PromptReport, PromptReports, asked_tokens, num_asked
from jaxrunner.runner.rows import RowMap
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.stages.inputs import StepInput, block_write_capacity
from jaxrunner.stages.prompt_logprobs import prompt_layout
from jaxrunner.stages.sample import StepOutput
from jaxrunner.stages.step import Pending
from jaxrunner.state.admission import ENTRIES_PER_CALL, AdmitEntry, pack_admit, release_entry
from jaxrunner.state.audit import audit
from jaxrunner.state.block_moves import MOVES_PER_CALL
from jaxrunner.state.block_writes import no_block_writes
from jaxrunner.state.records import derived_seed, request_record
from jaxrunner.state.request_arrays import request_rows
from jaxrunner.state.request_lists import list_writes
from jaxrunner.state.runner_state import RunnerState
from jaxrunner.timing.ranges import Annotate


class Batch(NamedTuple):
    """What the columns of a plan come to, in batch order. inputs: without the blocks that join a step, and the bucket
    for them. columns: the plan's. most_writes: block writes that go up with the step."""

    ids: BatchIds
    inputs: StepInput
    facts: RowFacts
    bucket: Bucket
    columns: PlanColumns
    most_writes: int


class Parked(NamedTuple):
    """A step between `execute_model` and `sample_tokens`. output is set when the whole step was launched.

    prompt: the tokens of prompts that are to be scored. samples: bool[B], requests that get a token.
    """

    ids: BatchIds
    facts: RowFacts
    output: StepOutput | None
    pending: Pending | None
    prompt: AskedTokens | None
    samples: np.ndarray


class DeviceRunner:
    """model, weights: from `load`. ladder: `Ladder.default` for the configuration's sizes if not given.
    seed: requests without a seed of their own get one derived from it and their order of arrival.

    `annotate` names the ranges of a step for profilers, see `jaxrunner.timing`.
    """

    def __init__(
        self, model: Model, weights: Any, config: RunnerConfig, *, ladder: Ladder | None = None, seed: int = 0
    ):
        if config.runner not in (None, "device"):
            raise AdmissionError(f"the configuration asks for runner {config.runner!r}; `build_runner` builds that one")
        self.model = model
        self.weights = weights
        self.config = config
        self.ladder = ladder or default_ladder(model, config)
        self.state: RunnerState = empty_state(model, config)
        self.groups = self.state.tables.groups
        options: dict[str, Any] = {"implementation": config.implementation, "custom": config.custom}
        programs = ProgramSet(model, weights, self.state, self.ladder, **options)
        cache = open_cache(config.executable_cache)
        self.table: BucketTable[ProgramSet] = BucketTable(programs, policy=config.bucket_policy, cache=cache)
        self.rows = RowMap(config.max_num_seqs)
        widths = [table.shape[1] for table in self.state.tables.block_table]
        self._prompts = PromptReports()
        self._host = HostRows(config.max_num_seqs + 1, self.groups, config.max_model_len)
        self._last: Batch | None = None
        declared = self.state.sampling.custom
        self._checks = PlanChecks(model, config, self.groups, widths, self.ladder.max_num_tokens, declared)
        self._seed = seed
        self._num_admitted = 0
        self._parked: Parked | None = None
        self._kept = KeptArrays(self.state.sampling.custom)
        self.masks = GrammarMasks(model.vocab_size)
        self.annotate: Annotate = TraceAnnotation

    @staticmethod
    def programs_of(model: Model, weights: Any, config: RunnerConfig, ladder: Ladder) -> ProgramSet:
        """The programs of a runner of these sizes, from shapes alone. weights: arrays or shapes."""
        state = jax.eval_shape(lambda: empty_state(model, config))
        options: dict[str, Any] = {"implementation": config.implementation, "custom": config.custom}
        return ProgramSet(model, weights, state, ladder, **options)

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
        with self.annotate("preprocess"):
            plan = self.check(scheduler_output)
            writes = self.update_states(scheduler_output, plan)
            if not scheduler_output.total_num_scheduled_tokens:
                self._apply_admissions([AdmitEntry(row=0, block_writes=writes)] if len(writes) else [])
                return ModelRunnerOutput.with_kv_conn_output_only(None)
            with self.annotate("inputs"):
                batch = self.build_inputs(plan.columns)
                entry, upload = self._pack(batch, writes)
        self._parked = self._launch(entry, upload, batch)
        if self.config.check_invariants:
            audit(self.state)
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput:
        """Complete the step that `execute_model` launched. With async_scheduling the result is still on its way.

        grammar_output: the masks of all requests with structured_outputs that get a token in this step, in any order.
        They are needed only now, so fill them while the forward pass runs. Raises AdmissionError where one is missing
        or has no such request; the step then still waits, for masks that fit.
        """
        if self._parked is None:
            raise RuntimeError("sample_tokens without a step; call execute_model first")
        with self.annotate("bookkeeping"):
            result = self._complete(self._parked, grammar_output)
        return result if self.config.async_scheduling else result.get_output()

    def warm_up(self, **options: Any) -> None:
        """Make the executables of the whole ladder, now or in the background; see `BucketTable.warm_up`."""
        self.table.warm_up(**options)

    def check(self, so: SchedulerOutput) -> CheckedPlan:
        """The plan and its requests as columns. A plan that cannot be run raises, see `execute_model`."""
        plan = self._checks.check(so, self.rows, self._host)
        if not self._host.may_go_on(plan):
            self._checks.check_limits(plan, so.scheduled_cached_reqs.req_ids, self._host)
        if not plan.is_quiet:
            self._keep_arrays(so)
            for request in so.scheduled_new_reqs:
                self._kept.values(request)
        return plan

    def update_states(self, so: SchedulerOutput, plan: CheckedPlan) -> np.ndarray:
        """Stage 0, on the host: free rows of finished and preempted requests, give rows to new ones, move blocks, and
        return the block-table writes of known ones, i32[N, 4]. Rows that changed go up through the admit executable.
        """
        if not plan.is_quiet:
            self._change_rows(so)
            self._move_blocks(so)
        return no_block_writes() if plan.growth is None else self._host.grow(plan.growth)

    def _change_rows(self, so: SchedulerOutput) -> None:
        released = set()
        for req_id in sorted(so.finished_req_ids | (so.preempted_req_ids or set())):
            self._prompts.drop(req_id)
            if (row := self.rows.remove(req_id)) is not None:
                released.add(row)
        entries = []
        for request in so.scheduled_new_reqs:
            if (row := self.rows.remove(request.req_id)) is not None:
                released.add(row)
            entry = self._admit_entry(request)
            released.discard(entry.row)
            entries.append(entry)
        self._give_blocks(entries, so.scheduled_new_reqs)
        for row in released:
            self._host.clear(row)
        self._kept.forget(so.finished_req_ids | {r.req_id for r in so.scheduled_new_reqs})
        self._apply_admissions([release_entry(row) for row in sorted(released)] + entries)

    def build_inputs(self, columns: PlanColumns) -> Batch:
        """The step's input, without the blocks that join it. Of a plan with the columns of the one before it is that
        one's."""
        if (last := self._last) is not None and columns is last.columns:
            return last
        req_ids, counts = columns.req_ids, columns.num_tokens
        if columns.is_plain:
            new = self.rows.take(req_ids[len(columns.rows) :])
            rows = np.concatenate([columns.rows, new]) if len(new) else columns.rows
        else:
            rows = self.rows.take(req_ids)
        if (order := batch_order(counts, self.ladder.query_len)) is not None:
            req_ids, rows, counts = [*map(req_ids.__getitem__, order.tolist())], rows[order], counts[order]
        facts = self._host.facts(rows)
        inputs = StepInput(
            idx_mapping=rows,
            num_scheduled_tokens=counts,
            num_draft_tokens=np.zeros(len(rows), np.int32),
            groups=self.groups,
            tier=facts.tier,
            keeps_tokens=(asked := self._prompt_tokens(rows, counts)) is not None and len(asked.tokens) > 0,
        )
        bucket = self.ladder.pick(inputs)
        most = block_write_capacity(bucket, self.groups)
        batch = Batch(BatchIds(req_ids), inputs, facts, bucket, columns, most)
        self._last = None if len(self._prompts) else batch
        return batch

    def audit(self, *, shared_blocks: bool = False) -> None:
        """Raises InvariantError if the state breaks an invariant; see `jaxrunner.state.audit`."""
        audit(self.state, shared_blocks=shared_blocks)

    def _pack(self, batch: Batch, writes: np.ndarray) -> tuple[Entry, np.ndarray]:
        """(the executable that will run, its upload). Block writes that do not fit into it go up before it."""
        if len(writes) > batch.most_writes:
            self._apply_admissions([AdmitEntry(row=0, block_writes=writes)])
            writes = no_block_writes()
        program = self.table.programs.first(batch.bucket, has_grammar=batch.facts.has_grammar)
        entry = self._look_up(program, real_tokens=batch.columns.total)
        assert entry.program.bucket is not None
        return entry, batch.inputs.pack_with(writes, entry.program.bucket)

    def _look_up(self, program: Program, *, real_tokens: int = 0) -> Entry:
        with self.annotate("lookup"):
            return self.table.get(program, real_tokens=real_tokens)

    def _launch(self, entry: Entry, upload: np.ndarray, batch: Batch) -> Parked:
        with self.annotate("forward", program=entry.program):
            self.state, result = self.table.call(entry, self.weights, self.state, upload)
        with self.annotate("bookkeeping"):
            rows, counts = batch.inputs.idx_mapping, batch.inputs.num_scheduled_tokens
            prompt = None if batch is self._last else self._prompt_tokens(rows, counts)
            samples = self._host.advance(rows, counts)
            pending, output = (None, result) if entry.program.kind == "step" else (result, None)
        return Parked(batch.ids, batch.facts, output, pending, prompt, samples)

    def _complete(self, parked: Parked, grammar_output: GrammarOutput | None) -> AsyncOutput:
        """Launch what is left of the step."""
        facts = parked.facts
        if facts.has_grammar or grammar_output is not None:
            check_grammar_output(grammar_output, parked.ids.req_ids, facts.is_structured, parked.samples)
        self._parked = None
        output = parked.output
        if output is None:
            entry = self._look_up(self.table.programs.finish(len(parked.ids), facts.tier))
            assert parked.pending is not None
            masks = grammar_output if facts.has_grammar else None
            bitmask = self.masks.of(masks, parked.ids.req_ids, entry.program.size)
            with self.annotate("sample"):
                pending = parked.pending.last_tokens
                self.state, output = self.table.call(entry, self.weights, self.state, pending, bitmask)
        asked = facts.asked if parked.prompt is None else self._score_prompts(parked, parked.prompt)
        may_forbid = self.table.programs.may_forbid(facts.tier, has_grammar=facts.has_grammar)
        is_async = self.config.async_scheduling
        return AsyncOutput(
            parked.ids, output, asked, may_forbid=may_forbid, starts_copy=is_async, annotate=self.annotate
        )

    def _prompt_tokens(self, rows: np.ndarray, counts: np.ndarray) -> AskedTokens | None:
        if not len(self._prompts):
            return None
        return asked_tokens(rows, counts, self._host.computed[rows], self._host.num_prompt_scores[rows])

    def _score_prompts(self, parked: Parked, tokens: AskedTokens) -> Asked:
        """Launch the scoring of a step's prompt tokens, as many calls as they need."""
        program, found = self.table.programs.prompt_logprobs, []
        layout = prompt_layout(program.size)
        for start in range(0, len(tokens.tokens), program.size):
            part = slice(start, start + program.size)
            values = {"tokens": tokens.tokens[part], "rows": tokens.rows[part], "positions": tokens.positions[part]}
            entry, upload = self._look_up(program), layout.pack(values)
            with self.annotate("sample"):
                self.state, scores = self.table.call(entry, self.weights, self.state, parked.pending, upload)
            found.append(scores)
        piece, prompts = self._prompts.enter(parked.ids.req_ids, tokens, found)
        return parked.facts.asked._replace(piece=piece, prompts=prompts)

    def _apply_admissions(self, entries: list[AdmitEntry]) -> None:
        programs = self.table.programs
        while entries:
            count, program = _admission_call(entries, programs)
            entry = self._look_up(program)
            upload = pack_admit(programs.admit_layout(entry.program), entries[:count])
            with self.annotate("admit"):
                self.state = self.table.call(entry, self.state, upload)
            entries = entries[count:]

    def _move_blocks(self, so: SchedulerOutput) -> None:
        """Zero and copy whole blocks, before the forward pass."""
        if not (so.new_block_ids_to_zero or so.kv_cache_block_copies):
            return
        entry = self._look_up(Program("moves", size=MOVES_PER_CALL))
        for upload in block_moves(so, self.config):
            with self.annotate("admit"):
                self.state = self.table.call(entry, self.state, upload)

    def _admit_entry(self, request: NewRequestData) -> AdmitEntry:
        row = self.rows.add(request.req_id)
        self._num_admitted += 1
        params = request.sampling_params or SamplingParams()
        assert request.prompt_token_ids is not None
        tokens = np.array(request.prefill_token_ids or request.prompt_token_ids, np.int32)
        record = request_record(
            prompt_len=len(request.prompt_token_ids),
            prefill_len=len(tokens),
            num_computed_tokens=request.num_computed_tokens,
            params=params,
            seed=derived_seed(self._seed, self._num_admitted) if params.seed is None else params.seed,
        )
        vocab_size = self.model.vocab_size
        scores = num_asked(params, len(request.prompt_token_ids), len(tokens))
        if scores:
            self._prompts.add(request.req_id, PromptReport.asked_by(params, vocab_size))
        computed = request.num_computed_tokens
        self._host.occupy(row, len(tokens), computed, params, vocab_size=vocab_size, num_prompt_scores=scores)
        lists = list_writes(params, self.model.eos_token_ids, self.config.list_sizes)
        arrays = request_rows(params, self.state.sampling.custom, len(tokens), self._kept.values(request))
        return AdmitEntry(row, record, tokens, list_writes=lists, arrays=arrays)

    def _give_blocks(self, entries: list[AdmitEntry], requests: list[NewRequestData]) -> None:
        """Their blocks enter the entries of these requests."""
        if not entries:
            return
        blocks = BlockLists.of([request.block_ids for request in requests], len(self.groups))
        blocks = blocks.in_kernel_blocks(self._host.blocks_per_kv_block)
        writes = self._host.append_blocks(np.array([entry.row for entry in entries]), blocks)
        start = 0
        for entry, end in zip(entries, blocks.sizes.sum(axis=1).cumsum().tolist(), strict=True):
            entry.block_writes, start = writes[start:end], end

    def _keep_arrays(self, so: SchedulerOutput) -> None:
        """Copy out of their rows what preempted requests cannot have again."""
        if not self._kept.is_needed:
            return
        leaving = (so.preempted_req_ids or set()) | {r.req_id for r in so.scheduled_new_reqs}
        held = sorted(req_id for req_id in leaving - so.finished_req_ids if req_id in self.rows)
        for start in range(0, len(held), COPY.size):
            part = held[start : start + COPY.size]
            rows = np.zeros(COPY.size, np.int32)
            rows[: len(part)] = self.rows.take(part)
            entry = self._look_up(COPY)
            with self.annotate("admit"):
                self.state, copied = self.table.call(entry, self.state, rows)
            self._kept.keep(part, copied)


def default_ladder(model: Model, config: RunnerConfig) -> Ladder:
    """The ladder of a runner that was given none."""
    return Ladder.default(model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens)


def _admission_call(entries: list[AdmitEntry], programs: ProgramSet) -> tuple[int, Program]:
    """(how many of the first entries one call takes, the program for them)."""
    count = tokens = blocks = lists = arrays = 0
    program = None
    for entry in entries[:ENTRIES_PER_CALL]:
        tokens, blocks = tokens + len(entry.tokens), blocks + len(entry.block_writes)
        lists, arrays = lists + len(entry.list_writes), arrays + bool(entry.arrays)
        fitting = programs.admit_for(tokens, blocks, lists, arrays)
        if fitting is None:
            break
        count, program = count + 1, fitting
    if program is None:
        raise CapacityError(f"{tokens} tokens and {blocks} blocks of one request do not fit the admit executables")
    return count, program
