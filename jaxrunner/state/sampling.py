"""Sampling parameters on the device: one row a request, fully rewritten at admission."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrunner.state.fields import SAMPLING_COLUMN


class SamplingState(struct.PyTreeNode):
    """params: i32[R, len(SAMPLING_FIELDS)], floats bit-cast; see `jaxrunner.state.fields`.

    stop_ids: i32[R, S], id + 1 of what may not be sampled below min_len, 0 where unused. None masks nothing.
    """

    params: jax.Array
    stop_ids: jax.Array | None = None

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
    def tier(self) -> jax.Array:
        """i32[R], index in `TIERS`. For the host: inside an executable the tier is static."""
        return self.params[:, SAMPLING_COLUMN["tier"]]

    @property
    def max_stop_ids(self) -> int:
        """S, stop ids that a row can hold."""
        return 0 if self.stop_ids is None else self.stop_ids.shape[1]

    def take(self, rows: jax.Array) -> SamplingState:
        """The parameters of some rows, in batch order."""
        return jax.tree.map(lambda array: array[rows], self)

    def _column_f32(self, name: str) -> jax.Array:
        return lax.bitcast_convert_type(self.params[:, SAMPLING_COLUMN[name]], jnp.float32)
