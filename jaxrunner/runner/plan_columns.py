"""`PlanColumns`: the requests of a plan as columns, made once a plan and kept while plans name the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrunner.contract import CachedRequestData, SchedulerOutput, TokenCounts
from jaxrunner.runner.admission import NOT_BUILT_STEP_FIELDS
from jaxrunner.runner.block_lists import BlockLists

NO_ROW = -1
COUNTS = (dict, TokenCounts)
MOST_TOKENS = np.iinfo(np.int32).max
NEWS = ("scheduled_new_reqs", "finished_req_ids", "preempted_req_ids", "new_block_ids_to_zero", "kv_cache_block_copies")
"""Fields of a plan in which nothing is said where no request comes or goes and no block is moved."""
_news = attrgetter(*NEWS, *NOT_BUILT_STEP_FIELDS)
_unused = attrgetter("resumed_req_ids", "all_token_ids")


class RequestRows(Protocol):
    """Where a runner has its requests. row_of: request -> row. version: another number whenever that has changed."""

    row_of: dict[str, int]
    version: int


class Growth(NamedTuple):
    """n requests whose tables grow. places: i64[n], among those of `scheduled_cached_reqs`; rows: i32[n]. blocks: what
    each gets, in kernel blocks. before, held: i32[n, G], what each had, and has then."""

    places: np.ndarray
    rows: np.ndarray
    blocks: BlockLists
    before: np.ndarray
    held: np.ndarray


class PlanColumns(NamedTuple):
    """C requests that the runner holds, `scheduled_cached_reqs`, and B with tokens to run. Arrays are read-only.

    rows: i32[C], state rows. counts: i32[C], tokens that each runs, 0 for none. req_ids, num_tokens: of the B, in the
    plan's order, i32[B]. total: the sum of num_tokens. is_plain: the B are the C and behind them the new requests, each
    in its order.
    """

    rows: np.ndarray
    counts: np.ndarray
    req_ids: list[str]
    num_tokens: np.ndarray
    total: int
    is_plain: bool

    @classmethod
    def of(cls, so: SchedulerOutput, row_of: dict[str, int]) -> PlanColumns:
        """Of any plan that `check_scheduler_output` accepts."""
        cached, num_tokens = so.scheduled_cached_reqs.req_ids, so.num_scheduled_tokens
        return cls(
            rows=np.fromiter(map(row_of.__getitem__, cached), np.int32, len(cached)),
            counts=np.fromiter(map(num_tokens.get, cached, repeat(0)), np.int32, len(cached)),
            req_ids=list(num_tokens),
            num_tokens=np.fromiter(num_tokens.values(), np.int32, len(num_tokens)),
            total=so.total_num_scheduled_tokens,
            is_plain=False,
        )


class CheckedPlan(NamedTuple):
    """A plan that can be run. growth: None if no table grows. is_quiet: no request comes or goes, no block is moved,
    and the columns are those of the plan before."""

    columns: PlanColumns
    growth: Growth | None
    is_quiet: bool


class PlainPlans:
    """Makes the columns of plain plans, and knows those of the last one.

    A plan is plain if it names its requests by one and the same text wherever it names them, known ones first, gives
    each of them a positive number of tokens, and ends none that it schedules. Texts and small numbers are compared by
    identity: what is the same object as a text that was looked at before is that text, and neither its type nor its row
    has to be looked up again. An equal object of another type is none.
    """

    def __init__(self) -> None:
        self._columns: PlanColumns | None = None
        self._version = 0
        self._types: list[type] = []
        self._values: list[int] = []
        self._shared: TokenCounts | None = None

    def remember(self, so: SchedulerOutput, columns: PlanColumns, requests: RequestRows) -> None:
        """`again` is for repetitions of this plan, which `check_scheduler_output` has accepted, with these columns."""
        self._columns = None
        if columns.is_plain and not so.scheduled_new_reqs:
            self._columns, self._version = columns, requests.version
            self._types = [*map(type, _news(so))]
            self._values = [*so.num_scheduled_tokens.values()]
            self._shared = so.num_scheduled_tokens if type(so.num_scheduled_tokens) is TokenCounts else None

    def again(self, so: SchedulerOutput, requests: RequestRows) -> PlanColumns | None:
        """The columns of the remembered plan, if this one names the same requests with the same numbers of tokens, and
        has no news; None for any other. The blocks that it brings are still to be checked.

        A field without content is accepted for its type, so one of the type that was accepted is, too.
        """
        columns, cached, num_tokens = self._columns, so.scheduled_cached_reqs, so.num_scheduled_tokens
        if columns is None or type(cached) is not CachedRequestData or type(num_tokens) not in COUNTS:
            return None
        news, req_ids = _news(so), cached.req_ids
        if [*map(type, news)] != self._types or any(news) or any(_unused(cached)):
            return None
        if type(req_ids) is not list or type(cached.new_block_ids) is not list:
            return None
        known, values = columns.req_ids, self._values
        if not (len(req_ids) == len(num_tokens) == len(cached.new_block_ids) == len(known)):
            return None
        if so.total_num_scheduled_tokens != columns.total or requests.version != self._version:
            return None
        if not all(map(is_, req_ids, known)):
            return None
        if num_tokens is self._shared or (
            all(map(is_, num_tokens, known)) and all(map(is_, num_tokens.values(), values))
        ):
            return columns
        return None

    def columns(self, so: SchedulerOutput, requests: RequestRows) -> PlanColumns | None:
        """None if the plan is not plain, whatever is wrong with it. Then `check_scheduler_output` says whether it can
        be run; of a plain one that need not look at ids, at numbers of tokens, or at which requests it names.
        """
        num_tokens, cached = so.num_scheduled_tokens, getattr(so.scheduled_cached_reqs, "req_ids", None)
        if type(num_tokens) not in COUNTS or type(cached) is not list:
            return None
        new, gone = so.scheduled_new_reqs, (so.finished_req_ids, so.preempted_req_ids)
        if not isinstance(new, list | tuple) or not all(isinstance(ids, set | frozenset | None) for ids in gone):
            return None
        if any(req_id in num_tokens for ids in gone for req_id in ids or ()):
            return None
        req_ids, count = list(num_tokens), len(cached)
        named = [getattr(request, "req_id", None) for request in new]
        if not (_same(req_ids[:count], cached) and _same(req_ids[count:], named)):
            return None
        values = list(num_tokens.values())
        if not set(map(type, req_ids)) <= {str} or not set(map(type, values)) <= {int}:
            return None
        if not 0 < min(values, default=1) <= max(values, default=1) <= MOST_TOKENS:
            return None
        places = map(requests.row_of.get, cached, repeat(NO_ROW))
        rows, counts = np.fromiter(places, np.int32, count), np.array(values, np.int32)
        if (rows == NO_ROW).any():
            return None
        rows.flags.writeable = counts.flags.writeable = False
        return PlanColumns(rows, counts[:count] if new else counts, req_ids, counts, sum(values), True)


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether both hold the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))
