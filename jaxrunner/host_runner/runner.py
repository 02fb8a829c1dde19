"""`HostRunner`: vLLM's V1 design. Request state is dense NumPy rows on the host, and so is input preparation.

The contract is that of `DeviceRunner`, and so are models, kernels, sampler and ladder; nothing of the request state and
of input preparation is. What the device keeps is `DeviceCarry`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.compile.buckets import Tier
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.executable_cache import open_cache
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import COPY, Program
from jaxrunner.compile.table import BucketTable
from jaxrunner.contract import GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.host_runner.array_rows import ArrayRows
from jaxrunner.host_runner.audit import audit_rows
from jaxrunner.host_runner.batch_updates import BatchListener
from jaxrunner.host_runner.dense_batch import DenseBatch
from jaxrunner.host_runner.first_half import HalfStep
from jaxrunner.host_runner.flights import Flights
from jaxrunner.host_runner.input_arrays import write_inputs
from jaxrunner.host_runner.list_rows import ListRows
from jaxrunner.host_runner.programs import ARRANGE, HostPrograms
from jaxrunner.host_runner.sampling_metadata import SamplingMetadata
from jaxrunner.host_runner.second_half import score_layout
from jaxrunner.host_runner.sizes import empty_carry, host_sizes, num_rows, row_bank
from jaxrunner.host_runner.staging import StagingBuffer, StagingRing
from jaxrunner.models.model import Model
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.runner.device_runner import default_ladder
from jaxrunner.runner.grammar import GrammarMasks, check_grammar_output
from jaxrunner.runner.kept_arrays import KeptArrays
from jaxrunner.runner.logprob_columns import asked_counts
from jaxrunner.runner.output import Asked, AsyncOutput
from jaxrunner.runner.plan_checks import PlanChecks, block_moves
from jaxrunner.runner.plan_columns import CheckedPlan
from jaxrunner.runner.prompt_reports import AskedTokens, PromptReport, PromptReports, asked_tokens, num_asked
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.stages.sample import StepOutput
from jaxrunner.state.block_moves import MOVES_PER_CALL
from jaxrunner.state.fields import REQUEST_FIELDS
from jaxrunner.state.records import derived_seed, request_record
from jaxrunner.state.row_copies import RowCopies
from jaxrunner.timing.ranges import Annotate


class PlannedStep(NamedTuple):
    """A step between `execute_model` and `sample_tokens`. output is set when the whole step was launched.

    prompt: the tokens of prompts that are to be scored. samples: bool[B], requests that get a token.
    """

    metadata: SamplingMetadata
    output: StepOutput | None
    half: HalfStep | None
    prompt: AskedTokens | None
    samples: np.ndarray

    @property
    def req_ids(self) -> list[str]:
        return self.metadata.ids.req_ids

    @property
    def tier(self) -> Tier:
        return self.metadata.tier


class HostRunner:
    """model, weights: from `load`. ladder: `Ladder.default` for the configuration's sizes if not given.
    seed: requests without a seed of their own get one derived from it and their order of arrival.

    lists, arrays and further `listeners` follow the rows by batch-update records. What needs request state on the
    device (forks, saving, recording, decode loops) is refused, see `state`. `annotate` names the ranges of a step for
    profilers, see `jaxrunner.timing`.
    """

    def __init__(
        self, model: Model, weights: Any, config: RunnerConfig, *, ladder: Ladder | None = None, seed: int = 0
    ):
        if config.runner not in (None, "host"):
            raise AdmissionError(f"the configuration asks for runner {config.runner!r}; `build_runner` builds that one")
        self.model = model
        self.weights = weights
        self.config = config
        self.ladder = ladder or default_ladder(model, config)
        count = num_rows(config, self.ladder)
        self.sizes = host_sizes(model, config)
        self.groups = self.sizes.groups
        self.carry = empty_carry(model, config, count)
        options: dict[str, Any] = {"implementation": config.implementation, "custom": config.custom}
        programs = HostPrograms(model, weights, self.carry, self.ladder, **options)
        cache = open_cache(config.executable_cache)
        self.table: BucketTable[HostPrograms] = BucketTable(programs, policy=config.bucket_policy, cache=cache)
        self.batch = DenseBatch(row_bank(self.sizes, count), config.max_num_seqs)
        declared = self.sizes.custom
        self.lists = ListRows(count, config.list_sizes, model.eos_token_ids)
        self.arrays = ArrayRows(count, declared) if declared else None
        self.listeners: list[BatchListener] = [self.lists, *([self.arrays] if self.arrays else [])]
        self.masks = GrammarMasks(model.vocab_size)
        most = self.ladder.max_num_tokens
        self._checks = PlanChecks(model, config, self.groups, self.sizes.widths, most, declared)
        self._prompts = PromptReports()
        self._kept = KeptArrays(declared)
        self._staging = StagingRing()
        self._metadata: SamplingMetadata | None = None
        self._flights = Flights(self.batch)
        self._seed = seed
        self._num_admitted = 0
        self._planned: PlannedStep | None = None
        self.annotate: Annotate = TraceAnnotation

    @staticmethod
    def programs_of(model: Model, weights: Any, config: RunnerConfig, ladder: Ladder) -> HostPrograms:
        """The programs of a runner of these sizes, from shapes alone. weights: arrays or shapes."""
        carry = jax.eval_shape(lambda: empty_carry(model, config, num_rows(config, ladder)))
        options: dict[str, Any] = {"implementation": config.implementation, "custom": config.custom}
        return HostPrograms(model, weights, carry, ladder, **options)

    @property
    def state(self) -> NoReturn:
        """Raises NotBuiltError: there is no request state on the device."""
        raise NotBuiltError(
            "a HostRunner keeps its requests on the host, so their state cannot be forked, saved, recorded or stepped "
            "by hand; use a DeviceRunner for that"
        )

    @property
    def rows(self) -> dict[str, int]:
        """Row of each request that the runner holds."""
        return self.batch.row_of

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Apply the plan and launch its forward pass. Returns None, and `sample_tokens` completes the step; or, for
        a plan without tokens, the empty output of a step without a forward pass.

        A plan that cannot be run raises AdmissionError or NotBuiltError before anything has changed. Raises
        RuntimeError if the previous step still waits for `sample_tokens`, and what ended a warm-up in the background.
        """
        self.table.check()
        if self._planned is not None:
            raise RuntimeError("execute_model was called twice; call sample_tokens first to complete the last step")
        with self.annotate("preprocess"):
            plan = self._check(scheduler_output)
            self.update_states(scheduler_output, plan)
            self._move_blocks(scheduler_output)
            if not scheduler_output.total_num_scheduled_tokens:
                return ModelRunnerOutput.with_kv_conn_output_only(None)
            # The step before may still run, the one before that may not: there are two columns for steps in flight.
            self._flights.land(most_left=1)
            with self.annotate("inputs"):
                metadata = self._refresh(self._order(scheduler_output, plan))
                self._arrange()
                prompt = self._prompt_tokens(metadata.num_reqs)
                buffer, entry = self._prepare(metadata, keeps_tokens=prompt is not None and len(prompt.tokens) > 0)
        self._planned = self._launch(entry, buffer, metadata, prompt)
        if self.config.check_invariants:
            self.audit()
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput:
        """Complete the step that `execute_model` launched. With async_scheduling the result is still on its way.

        grammar_output: the masks of all requests with structured_outputs that get a token in this step, in any order.
        They are needed only now, so fill them while the forward pass runs. Raises AdmissionError where one is missing
        or has no such request; the step then still waits, for masks that fit.
        """
        if self._planned is None:
            raise RuntimeError("sample_tokens without a step; call execute_model first")
        with self.annotate("bookkeeping"):
            result = self._complete(self._planned, grammar_output)
        if self.config.async_scheduling:
            return result
        with self.annotate("postprocess"):
            finished = result.get_output()
            self._flights.land(most_left=0)
        return finished

    def warm_up(self, **options: Any) -> None:
        """Make the executables of the whole ladder, now or in the background; see `BucketTable.warm_up`."""
        self.table.warm_up(**options)

    def audit(self, *, shared_blocks: bool = False) -> None:
        """Raises InvariantError if the rows break an invariant; see `jaxrunner.host_runner.audit`."""
        audit_rows(self.batch, self.sizes, self.config, shared_blocks=shared_blocks)

    def update_states(self, so: SchedulerOutput, plan: CheckedPlan) -> None:
        """Rows of finished and preempted requests go, new ones come, holes are filled, block tables grow."""
        if not plan.is_quiet:
            self._change_rows(so)
        if (growth := plan.growth) is not None:
            req_ids = so.scheduled_cached_reqs.req_ids
            places = [self.batch.row_of[req_ids[place]] for place in growth.places.tolist()]
            self._append_blocks(np.array(places), growth.blocks)
        self._tell()

    def _change_rows(self, so: SchedulerOutput) -> None:
        for req_id in sorted(so.finished_req_ids | (so.preempted_req_ids or set())):
            self._prompts.drop(req_id)
            self.batch.remove(req_id)
        for request in so.scheduled_new_reqs:
            self.batch.remove(request.req_id)
            self._admit(request)
        self._kept.forget(so.finished_req_ids | {r.req_id for r in so.scheduled_new_reqs})
        self.batch.condense()

    def prepare_inputs(
        self, metadata: SamplingMetadata, *, keeps_tokens: bool = False
    ) -> tuple[StagingBuffer, Program]:
        """The upload of the step that the rows' `scheduled` describes, and the program that takes it.

        keeps_tokens: the hidden states of all tokens are needed, which a decode does not keep.
        """
        counts = self.batch.rows.scheduled[: metadata.num_reqs]
        num_tokens, longest = int(counts.sum()), int(counts.max())
        uniform = longest if longest * len(counts) == num_tokens and not keeps_tokens else None
        bucket = self.ladder.pick_sizes(len(counts), num_tokens, uniform, metadata.tier)
        program = self.table.programs.first(bucket, has_grammar=bool(metadata.is_structured.any()))
        return self._staged(program, metadata), program

    def _staged(self, program: Program, metadata: SamplingMetadata) -> StagingBuffer:
        assert program.bucket is not None
        buffer = self._staging.acquire(self.table.programs.layout(program.bucket))
        rows = self.batch.rows
        write_inputs(buffer, rows, metadata, rows.flight_row[: metadata.num_reqs, self._flights.column], self.sizes)
        return buffer

    def _prepare(self, metadata: SamplingMetadata, *, keeps_tokens: bool) -> tuple[StagingBuffer, Entry]:
        buffer, program = self.prepare_inputs(metadata, keeps_tokens=keeps_tokens)
        entry = self._look_up(program, real_tokens=int(buffer.parts["query_start_loc"][metadata.num_reqs]))
        if entry.program != program:  # a larger one stands in for it
            buffer = self._staged(entry.program, metadata)
        return buffer, entry

    def _launch(
        self, entry: Entry, buffer: StagingBuffer, metadata: SamplingMetadata, prompt: AskedTokens | None
    ) -> PlannedStep:
        with self.annotate("forward", program=entry.program):
            self.carry, result = self.table.call(entry, self.weights, self.carry, buffer.vector)
        buffer.reader = result
        with self.annotate("bookkeeping"):
            samples = self._flights.take_off(metadata.num_reqs)
            half, output = (None, result) if entry.program.kind == "step" else (result, None)
        return PlannedStep(metadata, output, half, prompt, samples)

    def _complete(self, planned: PlannedStep, grammar_output: GrammarOutput | None) -> AsyncOutput:
        """Launch what is left of the step."""
        is_structured = planned.metadata.is_structured
        has_grammar = bool(is_structured.any())
        if has_grammar or grammar_output is not None:
            check_grammar_output(grammar_output, planned.req_ids, is_structured, planned.samples)
        self._planned = None
        output = planned.output
        if output is None:
            output = self._sample(planned, grammar_output if has_grammar else None)
        asked = planned.metadata.asked
        if planned.prompt is not None:
            asked = self._score_prompts(planned, planned.prompt)
        may_forbid = self.table.programs.may_forbid(planned.tier, has_grammar=has_grammar)
        self._flights.add(output, may_forbid=may_forbid)
        options: dict[str, Any] = {"may_forbid": may_forbid, "starts_copy": self.config.async_scheduling}
        return AsyncOutput(planned.metadata.ids, output, asked, annotate=self.annotate, **options)

    def _look_up(self, program: Program, *, real_tokens: int = 0) -> Entry:
        with self.annotate("lookup"):
            return self.table.get(program, real_tokens=real_tokens)

    def _sample(self, planned: PlannedStep, grammar_output: GrammarOutput | None) -> StepOutput:
        programs = self.table.programs
        entry = self._look_up(programs.finish(len(planned.req_ids), planned.tier))
        size, tier = entry.program.size, entry.program.tier
        assert planned.half is not None
        bitmask = self.masks.of(grammar_output, planned.req_ids, size)
        lists = self.lists.on_device() if programs.reads_lists(tier) else None
        # A copy: JAX may read the memory it is given until the step is over, and rows are written before that.
        tokens = self.batch.rows.token_ids[:size].copy() if programs.reads_tokens(tier) else None
        with self.annotate("sample"):
            arguments = (planned.half.last_tokens, bitmask, lists, tokens)
            self.carry, output = self.table.call(entry, self.weights, self.carry, *arguments)
        return output

    def _prompt_tokens(self, num_reqs: int) -> AskedTokens | None:
        if not len(self._prompts):
            return None
        rows, which = self.batch.rows, slice(0, num_reqs)
        places = np.arange(num_reqs, dtype=np.int32)
        return asked_tokens(places, rows.scheduled[which], rows.computed[which], rows.num_prompt_scores[which])

    def _score_prompts(self, planned: PlannedStep, tokens: AskedTokens) -> Asked:
        """Launch the scoring of a step's prompt tokens, as many calls as they need."""
        program, found = self.table.programs.prompt_logprobs, []
        layout, scored = score_layout(program.size), self.batch.rows.token_ids[tokens.rows, tokens.positions]
        for start in range(0, len(scored), program.size):
            part = slice(start, start + program.size)
            upload = layout.pack({"place": tokens.tokens[part], "scored": scored[part], "row": tokens.rows[part]})
            entry, arguments = self._look_up(program), (planned.half, self.lists.on_device(), upload)
            with self.annotate("sample"):
                self.carry, scores = self.table.call(entry, self.weights, self.carry, *arguments)
            found.append(scores)
        piece, prompts = self._prompts.enter(planned.req_ids, tokens, found)
        return planned.metadata.asked._replace(piece=piece, prompts=prompts)

    def _check(self, so: SchedulerOutput) -> CheckedPlan:
        plan = self._checks.check(so, self.batch, self.batch.rows)
        self._checks.check_limits(plan, so.scheduled_cached_reqs.req_ids, self.batch.rows)
        self._keep_arrays(so)
        for request in so.scheduled_new_reqs:
            self._kept.values(request)
        return plan

    def _keep_arrays(self, so: SchedulerOutput) -> None:
        """Copy out of their rows what preempted requests cannot have again."""
        if not self._kept.is_needed:
            return
        leaving = (so.preempted_req_ids or set()) | {r.req_id for r in so.scheduled_new_reqs}
        held = sorted(req_id for req_id in leaving - so.finished_req_ids if req_id in self.batch.row_of)
        if not held:
            return
        self._flights.land(most_left=0)  # how many tokens they have is known for sure only then
        self._arrange()
        for start in range(0, len(held), COPY.size):
            part = held[start : start + COPY.size]
            rows = np.zeros(COPY.size, np.int32)
            rows[: len(part)] = [self.batch.row_of[req_id] for req_id in part]
            entry = self._look_up(COPY)
            with self.annotate("admit"):
                self.carry, values = self.table.call(entry, self.carry, rows)
            counts = self.batch.rows.known[rows], self.batch.rows.prefill_len[rows]
            self._kept.keep(part, RowCopies(values, *counts))

    def _arrange(self) -> None:
        """Bring the arrays on the device to where the batch's rows are."""
        for upload in self.arrays.take_uploads() if self.arrays else ():
            entry = self._look_up(ARRANGE)
            with self.annotate("admit"):
                self.carry = self.table.call(entry, self.carry, upload)

    def _admit(self, request: NewRequestData) -> None:
        params = request.sampling_params or SamplingParams()
        assert request.prompt_token_ids is not None
        tokens = request.prefill_token_ids or request.prompt_token_ids
        prompt_len, vocab_size = len(request.prompt_token_ids), self.model.vocab_size
        self._num_admitted += 1
        kept = self._kept.values(request)
        row, rows = self.batch.add(request.req_id, params, num_tokens=len(tokens), kept=kept), self.batch.rows
        record = request_record(
            prompt_len=prompt_len,
            prefill_len=len(tokens),
            num_computed_tokens=request.num_computed_tokens,
            params=params,
            seed=derived_seed(self._seed, self._num_admitted) if params.seed is None else params.seed,
        )
        rows.token_ids[row, : len(tokens)] = tokens
        rows.prompt_len[row] = prompt_len
        rows.prefill_len[row] = rows.known[row] = len(tokens)
        rows.computed[row] = request.num_computed_tokens
        rows.sampling[row] = record[len(REQUEST_FIELDS) :]
        rows.num_logprobs[row], rows.num_listed[row] = asked_counts(params, vocab_size)
        rows.is_structured[row] = params.structured_outputs is not None
        if scores := num_asked(params, prompt_len, len(tokens)):
            rows.num_prompt_scores[row] = scores
            self._prompts.add(request.req_id, PromptReport.asked_by(params, vocab_size))
        blocks = BlockLists.of([request.block_ids], len(self.groups))
        self._append_blocks(np.array([row]), blocks.in_kernel_blocks(self.sizes.blocks_per_kv_block))

    def _append_blocks(self, places: np.ndarray, blocks: BlockLists) -> None:
        """places: distinct rows. blocks: kernel blocks that each of them gets."""
        rows, sizes = self.batch.rows, blocks.sizes.ravel()
        held = rows.num_blocks[places]
        # The column of a list's first block, less the blocks that stand before it among all.
        first = (held + [columns.start for columns in self.sizes.columns]).ravel() - (np.cumsum(sizes) - sizes)
        column = np.repeat(first, sizes) + np.arange(len(blocks.ids))
        rows.block_table[np.repeat(places, blocks.sizes.sum(axis=1)), column] = blocks.ids
        rows.num_blocks[places] = held + blocks.sizes

    def _order(self, so: SchedulerOutput, plan: CheckedPlan) -> int:
        """Put the scheduled requests in front, decodes first. Returns how many they are."""
        rows, counts, places = self.batch.rows, so.num_scheduled_tokens, plan.columns.rows
        rows.scheduled[: self.batch.num_reqs] = 0
        if not plan.is_quiet:  # rows may have moved since it was checked
            places = np.fromiter(map(self.batch.row_of.__getitem__, counts), np.int64, len(counts))
        rows.scheduled[places] = plan.columns.num_tokens
        self.batch.reorder(self.ladder.query_len)
        self._tell()
        return len(counts)

    def _tell(self) -> None:
        update = self.batch.take_update()
        if update is not None:
            self._metadata = None
            for listener in self.listeners:
                listener.update_state(update)

    def _refresh(self, num_reqs: int) -> SamplingMetadata:
        if self._metadata is None or self._metadata.num_reqs != num_reqs:
            self._metadata = SamplingMetadata.of(self.batch.rows, num_reqs)
        return self._metadata

    def _move_blocks(self, so: SchedulerOutput) -> None:
        """Zero and copy whole blocks, before the forward pass."""
        if not (so.new_block_ids_to_zero or so.kv_cache_block_copies):
            return
        entry = self._look_up(Program("moves", size=MOVES_PER_CALL))
        for upload in block_moves(so, self.config):
            with self.annotate("admit"):
                self.carry = self.table.call(entry, self.carry, upload)
