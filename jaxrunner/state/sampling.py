"""Sampling parameters on the device: one row a request, fully rewritten at admission."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxrunner.state.fields import SAMPLING_COLUMN


class SamplingState(struct.PyTreeNode):
    """params: i32[R, len(SAMPLING_FIELDS)], floats bit-cast; see `jaxrunner.state.fields`."""

    params: jax.Array

    @property
    def temperature(self) -> jax.Array:
        """f32[R]; 0 means greedy."""
        return self._column_f32("temperature")

    @property
    def seed(self) -> jax.Array:
        """i32[R, 2], low and high words of each request's 64-bit seed."""
        low = SAMPLING_COLUMN["seed_lo"]
        return self.params[:, low : low + 2]

    def take(self, rows: jax.Array) -> SamplingState:
        """The parameters of some rows, in batch order."""
        return SamplingState(params=self.params[rows])

    def _column_f32(self, name: str) -> jax.Array:
        return lax.bitcast_convert_type(self.params[:, SAMPLING_COLUMN[name]], jnp.float32)
