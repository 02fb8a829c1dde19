"""`ListRows`: the lists that requests bring to the sampler, in batch order."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxrunner.host_runner.batch_updates import BatchUpdate, follow
from jaxrunner.state.request_lists import ListSizes, list_writes


class ListRows:
    """A `BatchListener` with one device copy. lists: i32[R, width], see `jaxrunner.state.request_lists`.

    They are wide and most requests have none, so they are no part of the step's upload: they go up when the batch has
    changed and a step needs them.
    """

    def __init__(self, num_rows: int, sizes: ListSizes, eos_token_ids: Sequence[int]):
        self.lists = np.zeros((num_rows, sizes.width), np.int32)
        self._sizes = sizes
        self._eos = eos_token_ids
        self._on_device: jax.Array | None = None

    def update_state(self, update: BatchUpdate) -> None:
        self._on_device = None
        self.lists[list(update.removed)] = 0
        for added in update.added:
            writes = list_writes(added.params, self._eos, self._sizes)
            self.lists[added.row] = 0
            self.lists[added.row, writes[:, 0]] = writes[:, 1]
        follow(self.lists, update.moved)

    def on_device(self) -> jax.Array:
        """i32[R, width], all rows."""
        if self._on_device is None:
            # A copy: JAX may keep the memory it is given.
            self._on_device = jax.device_put(self.lists.copy())
        return self._on_device
