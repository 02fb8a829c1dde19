"""`PlanColumns`: the requests of a plan as columns, made once a plan and kept while plans name the same requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrunner.contract import SchedulerOutput
from jaxrunner.runner.block_lists import BlockLists

NO_ROW = -1
MOST_TOKENS = np.iinfo(np.int32).max


class RequestRows(Protocol):
    """Where a runner has its requests. row_of: request -> row. version: another number whenever that has changed."""

    row_of: dict[str, int]
    version: int


class Growth(NamedTuple):
    """Requests whose tables grow. places: i64[n], among those of `scheduled_cached_reqs`. blocks: what each gets,
    in kernel blocks."""

    places: np.ndarray
    blocks: BlockLists


class PlanColumns(NamedTuple):
    """C requests that the runner holds, `scheduled_cached_reqs`, and B with tokens to run. Arrays are read-only.

    rows: i32[C], state rows. counts: i32[C], tokens that each runs, 0 for none. req_ids, num_tokens: of the B, in the
    plan's order, i32[B]. total: the sum of num_tokens. is_plain: the B are the C and behind them the new requests, each
    in its order. growth: None if no table grows.
    """

    rows: np.ndarray
    counts: np.ndarray
    req_ids: list[str]
    num_tokens: np.ndarray
    total: int
    is_plain: bool
    growth: Growth | None = None

    @classmethod
    def of(cls, so: SchedulerOutput, row_of: dict[str, int]) -> PlanColumns:
        """Of any plan that `check_scheduler_output` accepts."""
        cached, num_tokens = so.scheduled_cached_reqs.req_ids, so.num_scheduled_tokens
        return cls(
            rows=np.fromiter(map(row_of.__getitem__, cached), np.int32, len(cached)),
            counts=np.fromiter(map(num_tokens.get, cached, itertools.repeat(0)), np.int32, len(cached)),
            req_ids=list(num_tokens),
            num_tokens=np.fromiter(num_tokens.values(), np.int32, len(num_tokens)),
            total=so.total_num_scheduled_tokens,
            is_plain=False,
        )


class PlainPlans:
    """Makes the columns of plain plans, and knows those of the last one.

    A plan is plain if it names its requests by one and the same text wherever it names them, known ones first, gives
    each of them a positive number of tokens, and ends none that it schedules. Texts and small numbers are compared by
    identity: what is the same object as a text that was looked at before is that text, and neither its type nor its row
    has to be looked up again. An equal object of another type is none.
    """

    def __init__(self) -> None:
        self._req_ids: list[str] = []
        self._rows = np.zeros(0, np.int32)
        self._version: int | None = None
        self._values: list[int] = []
        self._num_tokens = np.zeros(0, np.int32)
        self._total = 0

    def columns(self, so: SchedulerOutput, requests: RequestRows) -> PlanColumns | None:
        """None if the plan is not plain, whatever is wrong with it. Then `check_scheduler_output` says whether it can
        be run; of a plain one that need not look at ids, at numbers of tokens, or at which requests it names.
        """
        num_tokens, cached = so.num_scheduled_tokens, getattr(so.scheduled_cached_reqs, "req_ids", None)
        if type(num_tokens) is not dict or type(cached) is not list:
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
        if not (self._have_rows(cached, req_ids, requests) and self._have_counts(list(num_tokens.values()))):
            return None
        counts = self._num_tokens[:count] if new else self._num_tokens
        return PlanColumns(self._rows, counts, req_ids, self._num_tokens, self._total, True)

    def _have_rows(self, cached: list[Any], req_ids: list[Any], requests: RequestRows) -> bool:
        if self._version == requests.version and len(cached) == len(req_ids) and _same(cached, self._req_ids):
            return True
        if not set(map(type, req_ids)) <= {str}:
            return False
        places = map(requests.row_of.get, cached, itertools.repeat(NO_ROW))
        rows = np.fromiter(places, np.int32, len(cached))
        if (rows == NO_ROW).any():
            return False
        rows.flags.writeable = False
        self._req_ids, self._rows, self._version = list(cached), rows, requests.version
        return True

    def _have_counts(self, values: list[Any]) -> bool:
        if _same(values, self._values):
            return True
        if (
            not set(map(type, values)) <= {int}
            or not 0 < min(values, default=1) <= max(values, default=1) <= MOST_TOKENS
        ):
            return False
        num_tokens = np.array(values, np.int32)
        num_tokens.flags.writeable = False
        self._values, self._num_tokens, self._total = values, num_tokens, sum(values)
        return True


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether both hold the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))
