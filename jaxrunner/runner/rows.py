"""The map from requests to state rows. A request keeps its row until it is removed; rows never move."""

from __future__ import annotations

from collections.abc import KeysView, Sequence

import numpy as np

from jaxrunner.errors import CapacityError
from jaxrunner.state.requests import PARKING_ROW


class RowMap:
    """Rows 1..max_num_seqs, handed out lowest first at the start and last freed first afterwards. row_of: the map.
    version: see `RequestRows`."""

    def __init__(self, max_num_seqs: int):
        self.row_of: dict[str, int] = {}
        self.version = 0
        self._free = list(range(max_num_seqs, PARKING_ROW, -1))

    def __contains__(self, req_id: object) -> bool:
        return req_id in self.row_of

    def __getitem__(self, req_id: str) -> int:
        return self.row_of[req_id]

    def __len__(self) -> int:
        return len(self.row_of)

    def keys(self) -> KeysView[str]:
        return self.row_of.keys()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def add(self, req_id: str) -> int:
        if not self._free:
            raise CapacityError(f"no free row for request {req_id!r}")
        row = self.row_of[req_id] = self._free.pop()
        self.version += 1
        return row

    def remove(self, req_id: str) -> int | None:
        """The row that became free, or None for an unknown request."""
        row = self.row_of.pop(req_id, None)
        if row is not None:
            self._free.append(row)
            self.version += 1
        return row

    def take(self, req_ids: Sequence[str]) -> np.ndarray:
        """i32[B], the row of each request."""
        return np.fromiter(map(self.row_of.__getitem__, req_ids), np.int32, len(req_ids))
