"""`ArrayRows`: arrays of requests for the user's functions, in batch order, by the records of the batch alone.

Steps update them, so they live on the device (`DeviceCarry.extras`), one row for each of the batch. When requests came,
went or moved, the next step is preceded by `arrange`, which does to these rows what was done to the batch's.
"""

from __future__ import annotations

import numpy as np

from jaxrunner.host_runner.batch_updates import BatchUpdate, follow
from jaxrunner.host_runner.device_carry import ARRAYS, arrange_layout
from jaxrunner.host_runner.row_fields import NONE
from jaxrunner.state.request_arrays import ArraySets, num_words, request_rows, to_words


class ArrayRows:
    """A `BatchListener`. num_rows: of the batch. sets: what the user's functions declare, not empty."""

    def __init__(self, num_rows: int, sets: ArraySets):
        self._sets = sets
        self._layout = arrange_layout(num_rows, sets)
        self._num_rows = num_rows
        self._settle()

    def update_state(self, update: BatchUpdate) -> None:
        self._is_settled = False
        removed = list(update.removed)
        self._source[removed], self._new[removed] = NONE, None
        for added in update.added:
            self._new[added.row] = request_rows(added.params, self._sets, added.num_tokens, added.kept)
        follow(self._source, update.moved, NONE)
        follow(self._new, update.moved, None)

    def take_uploads(self) -> list[np.ndarray]:
        """Uploads of `arrange` that bring the device to where the batch is; none if it is there."""
        if self._is_settled:
            return []
        new, source = np.flatnonzero(self._new), self._source
        uploads, room = [], self._layout.shape_of("row")[0]
        for start in range(0, max(len(new), 1), room):
            part = new[start : start + room]
            names = num_words(self._sets) if len(part) else ()
            words = {ARRAYS + name: np.stack([to_words(arrays[name]) for arrays in self._new[part]]) for name in names}
            uploads.append(self._layout.pack({"source": source, "num_new": len(part), "row": part, **words}))
            source = np.arange(self._num_rows)
        self._settle()
        return uploads

    def _settle(self) -> None:
        """The device is where the batch is. _source: row of the device that has the content of each row. _new: the
        arrays of requests that it does not have yet."""
        self._source = np.arange(self._num_rows)
        self._new = np.full(self._num_rows, None, object)
        self._is_settled = True
