"""`PlanChecks`: a whole plan against a runner's sizes and rows, before anything has changed. Any runner calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from typing import Any, Protocol

import numpy as np

from jaxrunner.contract import SchedulerOutput
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.models.model import Model
from jaxrunner.runner.admission import check_block_lists, check_new_request, check_scheduler_output
from jaxrunner.runner.block_lists import BlockLists
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.runner.plan_columns import Growth, PlainPlans, PlanColumns, RequestRows
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.block_moves import pack_moves
from jaxrunner.state.block_tables import KVGroup, expand_block_ids
from jaxrunner.state.reports import check_reports
from jaxrunner.state.request_arrays import ArraySets, check_extra_args
from jaxrunner.state.request_lists import check_lists


class RowCounts(Protocol):
    """What a runner knows of its rows. computed: i32[R], tokens that were scheduled. known: i32[R], tokens that there
    are or will be when the steps so far are done. num_blocks: i32[R, G], kernel blocks of each KV-cache group."""

    computed: np.ndarray
    known: np.ndarray
    num_blocks: np.ndarray


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

    def check(self, so: SchedulerOutput, requests: RequestRows, counts: RowCounts) -> PlanColumns:
        """The plan's columns. Raises AdmissionError, NotBuiltError or CapacityError, naming the request, for a plan
        that cannot be run.

        requests: that the runner holds. A steady step runs no Python per request here.
        """
        rows = requests.row_of
        columns = self._plain.columns(so, requests)
        check_scheduler_output(so, rows, plain_total=None if columns is None else columns.total)
        gone = {i for i in so.finished_req_ids | (so.preempted_req_ids or set()) if i in rows}
        readded = {r.req_id for r in so.scheduled_new_reqs if r.req_id in rows} - gone
        num_free = self.config.max_num_seqs - len(rows)
        if len(so.scheduled_new_reqs) > num_free + len(gone) + len(readded):
            raise CapacityError(f"more than max_num_seqs={self.config.max_num_seqs} requests at a time")
        self._check_new(so)
        if grown := so.scheduled_cached_reqs.with_new_blocks():
            growth = self._check_growth(so.scheduled_cached_reqs.req_ids, grown, rows, counts)
            columns = (columns or PlanColumns.of(so, rows))._replace(growth=growth)
        columns = columns or PlanColumns.of(so, rows)
        self._check_cached(so.scheduled_cached_reqs.req_ids, columns, counts)
        if so.new_block_ids_to_zero or so.kv_cache_block_copies:
            named = [*(so.new_block_ids_to_zero or [])]
            named += [b for c in so.kv_cache_block_copies or [] for b in (c.src_block_id, c.dst_block_id)]
            self._check_pool("a block to zero or to copy", named)
            block_moves(so, self.config)
        if so.total_num_scheduled_tokens > self.max_num_tokens:
            raise AdmissionError(
                f"{so.total_num_scheduled_tokens} tokens in one step; this runner takes {self.max_num_tokens}"
            )
        return columns

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

    def _check_growth(
        self, req_ids: list[str], grown: list[tuple[int, Any]], rows: dict[str, int], of: RowCounts
    ) -> Growth:
        """Raises AdmissionError if the blocks that known requests get are none, or more than their tables take.

        req_ids: of all known requests. grown: see `CachedRequestData.with_new_blocks`.
        """
        places, new_block_ids = zip(*grown, strict=True)
        held = of.num_blocks[[rows[req_ids[place]] for place in places]]
        blocks = BlockLists.if_sound(new_block_ids, len(self.groups), self.config.num_blocks)
        if blocks is None or (held + blocks.sizes * self._blocks_per_kv_block > self._table_widths).any():
            for place, count, block_ids in zip(places, held, new_block_ids, strict=True):
                check_block_lists(req_ids[place], block_ids, len(self.groups))
                self._check_blocks(req_ids[place], count, block_ids)
            blocks = BlockLists.of(new_block_ids, len(self.groups))
        return Growth(np.array(places), blocks.in_kernel_blocks(self._blocks_per_kv_block))

    def _check_cached(self, req_ids: list[str], columns: PlanColumns, of: RowCounts) -> None:
        """Raises AdmissionError if a known request is scheduled past its tokens, its blocks or max_model_len.

        req_ids: of the columns' rows. A steady step runs no Python per request here.
        """
        rows = columns.rows
        ends, known, held = of.computed[rows] + columns.counts, of.known[rows], of.num_blocks[rows]
        if (growth := columns.growth) is not None:
            held[growth.places] += growth.blocks.sizes
        room = [num_blocks * group.block_size for num_blocks, group in zip(held.T, self.groups, strict=True)]
        if not (ends > reduce(np.minimum, room, np.minimum(known, self.config.max_model_len))).any():
            return
        limits = {
            "that are known": known,
            "that its blocks hold": reduce(np.minimum, room),
            "of max_model_len": np.full_like(known, self.config.max_model_len),
        }
        for what, limit in limits.items():
            if (over := (columns.counts > 0) & (ends > limit)).any():
                i = int(over.argmax())
                raise AdmissionError(
                    f"request {req_ids[i]!r}: tokens up to {ends[i]} are scheduled of {limit[i]} {what}"
                )

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
