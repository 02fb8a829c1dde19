"""The programs of a `HostRunner`: those of a ladder, without admissions, since requests enter on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.compile.buckets import TIER_FEATURES, Bucket, Feature, Tier
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import Program, Programs, vector
from jaxrunner.host_runner.device_part import DeviceCarry, run_decode, run_forward, run_sampler
from jaxrunner.host_runner.input_arrays import upload_layout
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.state.block_moves import apply_moves, move_layout
from jaxrunner.state.codec import Layout


class HostPrograms(Programs):
    """carry: arrays or shapes; see `Programs` for the others."""

    def __init__(
        self, model: Model, weights: Any, carry: DeviceCarry, ladder: Ladder, *, implementation: Implementation = None
    ):
        super().__init__(model, weights, carry, ladder, implementation=implementation)
        self.sizes = carry.sizes
        self.num_rows = carry.newest.shape[0]

    def layout(self, bucket: Bucket) -> Layout:
        """The upload of a step."""
        return upload_layout(bucket, self.sizes)

    def function(self, program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if program.kind == "moves":
            return apply_moves, (self._state, vector(move_layout()))
        if program.kind == "finish":
            run = functools.partial(run_sampler, self.model, tier=program.tier, num_reqs=program.size)
            half = self._half_shapes(self.ladder.mixed_bucket(self.ladder.mixed[0], "greedy"))
            return run, (self._weights, self._state, half, *self._constraint_shapes(program))
        assert program.bucket is not None
        upload = vector(self.layout(program.bucket))
        if program.kind == "begin":
            return self._forward(program.bucket), (self._weights, self._state, upload)
        options: dict[str, Any] = {"bucket": program.bucket, "implementation": self.implementation}
        return functools.partial(run_decode, self.model, **options), (self._weights, self._state, upload)

    def _forward(self, bucket: Bucket) -> Callable[..., Any]:
        options: dict[str, Any] = {"bucket": bucket, "num_rows": self.num_rows, "implementation": self.implementation}
        return functools.partial(run_forward, self.model, **options)

    def _half_shapes(self, bucket: Bucket) -> Any:
        upload = vector(self.layout(bucket))
        return jax.eval_shape(self._forward(bucket), self._weights, self._state, upload)[1]

    def _constraint_shapes(self, program: Program) -> tuple[jax.ShapeDtypeStruct, ...]:
        if not has_constraints(program.tier):
            return ()
        shapes = (self.num_rows, self.sizes.list_sizes.width), (program.size, self.sizes.max_model_len)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


def has_constraints(tier: Tier) -> bool:
    """Whether its sampler reads lists and tokens of the rows."""
    return Feature.CONSTRAINTS in TIER_FEATURES[tier]
