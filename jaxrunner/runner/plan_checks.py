"""`PlanChecks`: a whole plan against a runner's sizes and rows, before anything has changed. Any runner calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Protocol

import numpy as np

from jaxrunner.contract import CachedRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.models.model import Model
from jaxrunner.runner.admission import check_block_lists, check_new_request, check_scheduler_output
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.runner.plan_columns import CheckedPlan, Growth, PlainPlans, PlanColumns, RequestRows
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.block_moves import pack_moves
from jaxrunner.state.block_tables import KVGroup, expand_block_ids
from jaxrunner.state.reports import check_reports
from jaxrunner.state.request_arrays import ArraySets, check_extra_args
from jaxrunner.state.request_lists import check_lists


class RowCounts(Protocol):
    """What a runner knows of its rows. computed: i32[R], tokens that were scheduled. known: i32[R], tokens that there
    are or will be when the steps so far are done. num_blocks: i32[R, G], kernel blocks of each KV-cache group."""

    @property
    def computed(self) -> np.ndarray: ...
    @property
    def known(self) -> np.ndarray: ...
    @property
    def num_blocks(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class PlanChecks:
    """groups, widths: the KV-cache groups and the columns of their block tables. max_num_tokens: most of a step.
    custom: arrays that requests may bring."""

    model: Model
    config: RunnerConfig
    groups: tuple[KVGroup, ...]
    widths: Sequence[int]
    max_num_tokens: int
    custom: ArraySets = ()
    _plain: PlainPlans = dataclasses.field(default_factory=PlainPlans, init=False)

    def check(self, so: SchedulerOutput, requests: RequestRows, counts: RowCounts) -> CheckedPlan:
        """The plan, all of it looked at but for the limits of its known requests (`check_limits`). Raises
        AdmissionError, NotBuiltError or CapacityError, naming the request, for a plan that cannot be run.

        requests: that the runner holds. A steady step runs no Python per request here.
        """
        if (columns := self._plain.again(so, requests)) is not None:
            return CheckedPlan(columns, self._growth(so.scheduled_cached_reqs, columns, counts), True)
        columns = self._check_all(so, requests)
        plan = CheckedPlan(columns, self._growth(so.scheduled_cached_reqs, columns, counts), False)
        self._plain.remember(so, columns, requests)
        return plan

    def check_limits(self, plan: CheckedPlan, req_ids: list[str], of: RowCounts) -> None:
        """Raises AdmissionError if a known request is scheduled past its tokens, its blocks or max_model_len.

        req_ids: of the rows of the plan's columns. A steady step runs no Python per request here.
        """
        rows, counts = plan.columns.rows, plan.columns.counts
        ends, known, held = of.computed[rows] + counts, of.known[rows], of.num_blocks[rows]
        if (growth := plan.growth) is not None:
            held[growth.places] = growth.held
        room = [num_blocks * group.block_size for num_blocks, group in zip(held.T, self.groups, strict=True)]
        if not (ends > reduce(np.minimum, room, np.minimum(known, self.config.max_model_len))).any():
            return
        limits = {
            "that are known": known,
            "that its blocks hold": reduce(np.minimum, room),
            "of max_model_len": np.full_like(known, self.config.max_model_len),
        }
        for what, limit in limits.items():
            if (over := (counts > 0) & (ends > limit)).any():
                i = int(over.argmax())
                raise AdmissionError(
                    f"request {req_ids[i]!r}: tokens up to {ends[i]} are scheduled of {limit[i]} {what}"
                )

    def _check_all(self, so: SchedulerOutput, requests: RequestRows) -> PlanColumns:
        """The plan's columns. Looks at everything but what known requests get and have."""
        rows = requests.row_of
        columns = self._plain.columns(so, requests)
        check_scheduler_output(so, rows, plain_total=None if columns is None else columns.total)
        gone = {i for i in so.finished_req_ids | (so.preempted_req_ids or set()) if i in rows}
        readded = {r.req_id for r in so.scheduled_new_reqs if r.req_id in rows} - gone
        num_free = self.config.max_num_seqs - len(rows)
        if len(so.scheduled_new_reqs) > num_free + len(gone) + len(readded):
            raise CapacityError(f"more than max_num_seqs={self.config.max_num_seqs} requests at a time")
        self._check_new(so)
        if so.new_block_ids_to_zero or so.kv_cache_block_copies:
            named = [*(so.new_block_ids_to_zero or [])]
            named += [b for c in so.kv_cache_block_copies or [] for b in (c.src_block_id, c.dst_block_id)]
            self._check_pool("a block to zero or to copy", named)
            block_moves(so, self.config)
        if so.total_num_scheduled_tokens > self.max_num_tokens:
            raise AdmissionError(
                f"{so.total_num_scheduled_tokens} tokens in one step; this runner takes {self.max_num_tokens}"
            )
        return columns or PlanColumns.of(so, rows)

    def _check_new(self, so: SchedulerOutput) -> None:
        for request in so.scheduled_new_reqs:
            params, where = request.sampling_params or SamplingParams(), f"request {request.req_id!r}"
            check_new_request(
                request,
                vocab_size=self.model.vocab_size,
                max_model_len=self.config.max_model_len,
                num_groups=len(self.groups),
                block_size=self.config.block_size,
                num_scheduled_tokens=so.num_scheduled_tokens.get(request.req_id, 0),
            )
            check_lists(
                params,
                self.model.eos_token_ids,
                vocab_size=self.model.vocab_size,
                sizes=self.config.list_sizes,
                has_thinking=self.config.thinking is not None,
                where=where,
            )
            check_reports(params, self.config.reports, where=where)
            check_extra_args(params, self.custom, where)
            self._check_blocks(request.req_id, np.zeros(len(self.groups), np.int32), request.block_ids)

    def _check_pool(self, what: str, ids: list[int]) -> None:
        if bad := [b for b in ids if not 0 < b < self.config.num_blocks]:
            raise AdmissionError(f"{what}: block {bad[0]} is outside 1..{self.config.num_blocks - 1}")

    def _check_blocks(self, req_id: str, held: np.ndarray, block_ids: Iterable[list[int]]) -> None:
        """held: i32[G], kernel blocks that the request has already."""
        for ids in block_ids:
            self._check_pool(f"request {req_id!r}", ids)
        for ids, count, group, width in zip(block_ids, held, self.groups, self.widths, strict=True):
            if count + len(ids) * group.blocks_per_kv_block > width:
                raise AdmissionError(f"request {req_id!r}: more blocks than the {width} columns of its table")

    def _growth(self, cached: CachedRequestData, columns: PlanColumns, of: RowCounts) -> Growth | None:
        """What known requests get. Raises AdmissionError if it is no blocks, or more than their tables take."""
        growing, given = cached.with_new_blocks()
        if not growing:
            return None
        places = np.array(growing)
        rows = columns.rows[places]
        before = of.num_blocks[rows]
        blocks = BlockLists.if_sound(given, len(self.groups), self.config.num_blocks)
        if blocks is None:
            for place, count, block_ids in zip(growing, before, given, strict=True):
                check_block_lists(cached.req_ids[place], block_ids, len(self.groups))
                self._check_blocks(cached.req_ids[place], count, block_ids)
            blocks = BlockLists.of(given, len(self.groups))
        blocks = blocks.in_kernel_blocks(self._blocks_per_kv_block)
        held = before + blocks.sizes
        if (held > self._table_widths).any():
            for place, count, block_ids in zip(growing, before, given, strict=True):
                self._check_blocks(cached.req_ids[place], count, block_ids)
        return Growth(places, rows, blocks, before, held)

    @cached_property
    def _blocks_per_kv_block(self) -> np.ndarray:
        return np.array([group.blocks_per_kv_block for group in self.groups], np.int32)

    @cached_property
    def _table_widths(self) -> np.ndarray:
        return np.array(self.widths, np.int32)


def block_moves(so: SchedulerOutput, config: RunnerConfig) -> list[np.ndarray]:
    """Uploads for the blocks that a plan zeroes and copies before its forward pass, see `pack_moves`."""
    n = config.blocks_per_kv_block
    copies = so.kv_cache_block_copies or []
    src = expand_block_ids([c.src_block_id for c in copies], n)
    dst = expand_block_ids([c.dst_block_id for c in copies], n)
    zero = expand_block_ids(list(so.new_block_ids_to_zero or []), n)
    return pack_moves(zero, list(zip(src, dst, strict=True)))
