"""`DenseBatch`: the requests of a `HostRunner` in rows 0..N-1 without a hole, the scheduled ones in front.

Everything behind reads the prefix [:B] of an array, which is why rows move: `condense` fills the holes that finished
requests leave, `reorder` brings decodes to the front. A request that a step leaves out goes behind those that it
schedules and stays there; vLLM V1 takes it out of the batch and rebuilds its row from a second copy of its state.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrunner.errors import CapacityError
from jaxrunner.host_runner.batch_updates import AddedRow, BatchUpdate, MovedRow, MoveKind, swaps_of
from jaxrunner.host_runner.row_fields import RowBank
from jaxrunner.sampling_params import SamplingParams

DECODE, SHORT_EXTEND, LONG_EXTEND, PREFILL, LEFT_OUT = range(5)
"""Regions of the batch, in order: a token after the prefill; a piece of a prompt no longer than a decode, and a longer
one; a prompt from its beginning; requests that are not part of the step."""


class DenseBatch:
    """rows: the arrays. max_num_reqs: most requests. row_of: request -> row. version: another number
    whenever that has changed. num_reqs: N."""

    def __init__(self, rows: RowBank, max_num_reqs: int):
        self.rows = rows
        self.max_num_reqs = max_num_reqs
        self.row_of: dict[str, int] = {}
        self.version = 0
        self._holes: set[int] = set()
        self._numbers = list(range(max_num_reqs, 0, -1))
        self._removed: list[int] = []
        self._added: list[AddedRow] = []
        self._moved: list[MovedRow] = []

    @property
    def num_reqs(self) -> int:
        return len(self.row_of)

    def remove(self, req_id: str) -> int | None:
        """The row that became a hole, or None for an unknown request. `condense` comes before the next step."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self.version += 1
            self._numbers.append(int(self.rows.number[row]))
            self.rows.clear(row)
            self._holes.add(row)
        return row

    def add(
        self, req_id: str, params: SamplingParams, *, num_tokens: int = 0, kept: Mapping[str, np.ndarray] | None = None
    ) -> int:
        """An empty row for a new request: the lowest hole, or the one behind the last. num_tokens, kept: see
        `AddedRow`."""
        if self.num_reqs >= self.max_num_reqs:
            raise CapacityError(f"no free row for request {req_id!r}")
        row = min(self._holes, default=self.num_reqs)
        self._holes.discard(row)
        self.row_of[req_id] = row
        self.version += 1
        self.rows.req_ids[row], self.rows.number[row] = req_id, self._numbers.pop()
        self._added.append(AddedRow(row, req_id, params, num_tokens, kept or {}))
        return row

    def condense(self) -> None:
        """Fill the holes that are left with the last rows."""
        holes = np.array(sorted(h for h in self._holes if h < self.num_reqs), np.int64)
        if len(holes):
            behind = np.arange(self.num_reqs, self.num_reqs + len(self._holes))
            source = np.array([row for row in behind[::-1] if row not in self._holes], np.int64)
            self._relocate(source, holes)
            pairs = zip(source.tolist(), holes.tolist(), strict=True)
            self._moved += [MovedRow(row, hole, MoveKind.ONE_WAY) for row, hole in pairs]
        self._removed += sorted(self._holes)
        self._holes.clear()

    def reorder(self, decode_query_len: int = 1) -> None:
        """Bring the regions into their order. Only rows outside of their region move; those keep their order.

        `rows.scheduled` says which requests are part of the step. Source: vLLM V1,
        `reorder_batch_to_split_decodes_and_prefills`.
        """
        rows, n = self.rows, self.num_reqs
        is_decode = (rows.scheduled[:n] > 0) & (rows.scheduled[:n] <= decode_query_len)
        if (is_decode & (rows.computed[:n] >= rows.prefill_len[:n])).all():
            return
        region = self.regions(decode_query_len)
        target = np.flatnonzero(region != np.sort(region))
        if len(target):
            source = target[np.argsort(region[target], kind="stable")]
            stays = source == target
            source, target = source[~stays], target[~stays]
            self._moved += swaps_of(source, target)
            self._relocate(source, target)

    def swap(self, first: int, second: int) -> None:
        """Two requests change rows."""
        pair = np.array([first, second])
        self._relocate(pair, pair[::-1])
        self._moved.append(MovedRow(first, second, MoveKind.SWAP))

    def regions(self, decode_query_len: int = 1) -> np.ndarray:
        """i64[N], the region of each row."""
        rows, n = self.rows, self.num_reqs
        scheduled, computed = rows.scheduled[:n], rows.computed[:n]
        is_short, is_fresh = scheduled <= decode_query_len, computed == 0
        is_decode = computed >= rows.prefill_len[:n]
        conditions = [scheduled == 0, is_fresh, ~is_short, ~is_decode]
        return np.select(conditions, [LEFT_OUT, PREFILL, LONG_EXTEND, SHORT_EXTEND], DECODE)

    def take_update(self) -> BatchUpdate | None:
        """What has changed since the last call, None if nothing has. Taken once for each time that requests came or
        went: a record says nothing about the order of a removal and an earlier move."""
        if not (self._removed or self._added or self._moved):
            return None
        update = BatchUpdate(self.num_reqs, tuple(self._removed), tuple(self._added), tuple(self._moved))
        self._removed, self._added, self._moved = [], [], []
        return update

    def _relocate(self, source: np.ndarray, target: np.ndarray) -> None:
        self.rows.relocate(source, target)
        self.version += 1
        for row in target.tolist():
            self.row_of[self.rows.req_ids[row]] = row
