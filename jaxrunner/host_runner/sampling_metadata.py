"""`SamplingMetadata`: what sampling needs to know of the batch, made anew only when the batch has changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.host_runner.batch_updates import BatchUpdate, follow
from jaxrunner.host_runner.row_fields import RowBank
from jaxrunner.state.fields import SAMPLING_COLUMN
from jaxrunner.state.request_lists import ListSizes, list_writes


@dataclasses.dataclass(frozen=True)
class SamplingMetadata:
    """Of the B scheduled rows. tier: the sampler that serves all of them. params: i32[B, P]. prompt_len: i32[B].

    num_logprobs: i32[B]. wants_mask: bool[B].
    """

    tier: Tier
    params: np.ndarray
    prompt_len: np.ndarray
    num_logprobs: np.ndarray
    wants_mask: np.ndarray

    @property
    def num_reqs(self) -> int:
        return len(self.prompt_len)

    @classmethod
    def of(cls, rows: RowBank, num_reqs: int) -> SamplingMetadata:
        """A copy of what the first `num_reqs` rows hold."""
        features = rows.sampling[:num_reqs, SAMPLING_COLUMN["features"]]
        return cls(
            tier=lowest_tier(int(np.bitwise_or.reduce(features))),
            params=rows.sampling[:num_reqs].copy(),
            prompt_len=rows.prompt_len[:num_reqs].copy(),
            num_logprobs=rows.num_logprobs[:num_reqs].copy(),
            wants_mask=(features & Feature.SAMPLING_MASK) > 0,
        )


class ConstraintRows:
    """The lists that requests bring to the sampler, in batch order: a `BatchListener` with one device copy.

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
