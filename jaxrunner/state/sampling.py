"""Sampling parameters on the device: one row a request, fully rewritten at admission."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrunner.errors import AdmissionError
from jaxrunner.state.fields import SAMPLING_COLUMN
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports
from jaxrunner.state.request_arrays import ArraySets
from jaxrunner.state.request_lists import DEFAULT_LIST_SIZES, ListSizes


@dataclasses.dataclass(frozen=True)
class ThinkingTokens:
    """How a model marks its thinking: the ids that start it, those that end it, and those that end it when its budget
    is spent (by default the ordinary end). vLLM's `reasoning_config`.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    forced_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("start", "end", "forced_end"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not (self.start and self.end):
            raise AdmissionError(f"thinking needs ids that start and that end it, got {self}")
        object.__setattr__(self, "forced_end", self.forced_end or self.end)


class SamplingState(struct.PyTreeNode):
    """params: i32[R, len(SAMPLING_FIELDS)], floats bit-cast; see `jaxrunner.state.fields`.

    lists: i32[R, sizes.width], see `jaxrunner.state.request_lists`. None where no request can bring any.
    sizes, thinking, reports: static; how long the lists may be, the ids around a model's thinking, if it has such, and
    what is reported beside tokens. custom: static; what `RunnerState.extras` holds for the user's logits processors
    and sampler.
    """

    params: jax.Array
    lists: jax.Array | None = None
    sizes: ListSizes = struct.field(pytree_node=False, default=DEFAULT_LIST_SIZES)
    thinking: ThinkingTokens | None = struct.field(pytree_node=False, default=None)
    reports: Reports = struct.field(pytree_node=False, default=DEFAULT_REPORTS)
    custom: ArraySets = struct.field(pytree_node=False, default=())

    @property
    def temperature(self) -> jax.Array:
        """f32[R]; 0 means greedy."""
        return self._column_f32("temperature")

    @property
    def seed(self) -> jax.Array:
        """i32[R, 2], low and high words of each request's 64-bit seed."""
        low = SAMPLING_COLUMN["seed_lo"]
        return self.params[:, low : low + 2]

    @property
    def top_k(self) -> jax.Array:
        """i32[R]; 0 is off."""
        return self.params[:, SAMPLING_COLUMN["top_k"]]

    @property
    def top_p(self) -> jax.Array:
        """f32[R]; 0 and 1 are off."""
        return self._column_f32("top_p")

    @property
    def min_p(self) -> jax.Array:
        """f32[R]; 0 is off."""
        return self._column_f32("min_p")

    @property
    def min_len(self) -> jax.Array:
        """i32[R]; 0 is off."""
        return self.params[:, SAMPLING_COLUMN["min_len"]]

    @property
    def features(self) -> jax.Array:
        """i32[R], bits of `Feature`. For the host: inside an executable the tier is static."""
        return self.params[:, SAMPLING_COLUMN["features"]]

    @property
    def repetition_penalty(self) -> jax.Array:
        """f32[R]; 0 and 1 are off."""
        return self._column_f32("repetition_penalty")

    @property
    def frequency_penalty(self) -> jax.Array:
        """f32[R]; 0 is off."""
        return self._column_f32("frequency_penalty")

    @property
    def presence_penalty(self) -> jax.Array:
        """f32[R]; 0 is off."""
        return self._column_f32("presence_penalty")

    @property
    def thinking_budget(self) -> jax.Array:
        """i32[R], budget + 1; 0 is off."""
        return self.params[:, SAMPLING_COLUMN["thinking_budget"]]

    def list_of(self, name: str) -> jax.Array:
        """i32[R, n], one of the lists by its name in `ListSizes.columns`; n is 0 in a state without lists."""
        if self.lists is None:
            return jnp.zeros((self.params.shape[0], 0), jnp.int32)
        return self.lists[:, self.sizes.columns[name]]

    def take(self, rows: jax.Array) -> SamplingState:
        """The parameters of some rows, in batch order."""
        return jax.tree.map(lambda array: array[rows], self)

    def _column_f32(self, name: str) -> jax.Array:
        return lax.bitcast_convert_type(self.params[:, SAMPLING_COLUMN[name]], jnp.float32)
