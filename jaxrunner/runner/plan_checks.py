"""`PlanChecks`: a whole plan against a runner's sizes and rows, before anything has changed. Any runner calls it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxrunner.contract import CachedRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.models.model import Model
from jaxrunner.runner.admission import check_block_lists, check_new_request, check_scheduler_output
from jaxrunner.runner.config import RunnerConfig
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

    def check(self, so: SchedulerOutput, rows: dict[str, int], counts: RowCounts) -> None:
        """Raises AdmissionError, NotBuiltError or CapacityError, naming the request, for a plan that cannot be run.

        rows: row of each request that the runner holds. A steady step runs no Python per request here.
        """
        check_scheduler_output(so, rows)
        gone = {i for i in so.finished_req_ids | (so.preempted_req_ids or set()) if i in rows}
        readded = {r.req_id for r in so.scheduled_new_reqs if r.req_id in rows} - gone
        num_free = self.config.max_num_seqs - len(rows)
        if len(so.scheduled_new_reqs) > num_free + len(gone) + len(readded):
            raise CapacityError(f"more than max_num_seqs={self.config.max_num_seqs} requests at a time")
        self._check_new(so)
        cached = so.scheduled_cached_reqs
        for req_id, blocks in cached.with_new_blocks():
            check_block_lists(req_id, blocks, len(self.groups))
            self._check_blocks(req_id, counts.num_blocks[rows[req_id]], blocks)
        if cached.req_ids:
            places = np.fromiter(map(rows.__getitem__, cached.req_ids), np.int32, len(cached.req_ids))
            self._check_cached(cached, places, counts, so.num_scheduled_tokens)
        if so.new_block_ids_to_zero or so.kv_cache_block_copies:
            named = [*(so.new_block_ids_to_zero or [])]
            named += [b for c in so.kv_cache_block_copies or [] for b in (c.src_block_id, c.dst_block_id)]
            self._check_pool("a block to zero or to copy", named)
            block_moves(so, self.config)
        if so.total_num_scheduled_tokens > self.max_num_tokens:
            raise AdmissionError(
                f"{so.total_num_scheduled_tokens} tokens in one step; this runner takes {self.max_num_tokens}"
            )

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

    def _check_cached(
        self, cached: CachedRequestData, rows: np.ndarray, of: RowCounts, num_scheduled_tokens: dict[str, int]
    ) -> None:
        """Raises AdmissionError if a known request is scheduled past its tokens, its blocks or max_model_len.

        rows: of cached.req_ids. A steady step runs no Python per request here.
        """
        counts = np.fromiter(map(num_scheduled_tokens.get, cached.req_ids, itertools.repeat(0)), np.int32, len(rows))
        ends = of.computed[rows] + counts
        held = of.num_blocks[rows]
        if grown := cached.with_new_blocks():
            place = {req_id: i for i, req_id in enumerate(cached.req_ids)}
            for req_id, blocks in grown:
                held[place[req_id]] += [
                    len(b) * g.blocks_per_kv_block for b, g in zip(blocks, self.groups, strict=True)
                ]
        sizes = np.array([g.block_size for g in self.groups], np.int32)
        limits = {
            "that are known": of.known[rows],
            "that its blocks hold": (held * sizes).min(axis=1, initial=np.iinfo(np.int32).max),
            "of max_model_len": self.config.max_model_len,
        }
        for what, limit in limits.items():
            if (over := (counts > 0) & (ends > limit)).any():
                i = int(over.argmax())
                most = np.broadcast_to(limit, over.shape)[i]
                raise AdmissionError(
                    f"request {cached.req_ids[i]!r}: tokens up to {ends[i]} are scheduled of {most} {what}"
                )


def block_moves(so: SchedulerOutput, config: RunnerConfig) -> list[np.ndarray]:
    """Uploads for the blocks that a plan zeroes and copies before its forward pass, see `pack_moves`."""
    n = config.blocks_per_kv_block
    copies = so.kv_cache_block_copies or []
    src = expand_block_ids([c.src_block_id for c in copies], n)
    dst = expand_block_ids([c.dst_block_id for c in copies], n)
    zero = expand_block_ids(list(so.new_block_ids_to_zero or []), n)
    return pack_moves(zero, list(zip(src, dst, strict=True)))
