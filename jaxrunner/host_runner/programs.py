"""The programs of a `HostRunner`: those of a ladder, without admissions, since requests enter on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.compile.buckets import TIER_FEATURES, Bucket, Feature, Tier
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import COPY, Program, Programs, vector
from jaxrunner.host_runner.device_carry import DeviceCarry, arrange, arrange_layout, copy_arrays
from jaxrunner.host_runner.first_half import run_forward
from jaxrunner.host_runner.input_arrays import upload_layout
from jaxrunner.host_runner.second_half import run_decode, run_sampler, run_scores, score_layout
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomSampling
from jaxrunner.state.block_moves import apply_moves, move_layout
from jaxrunner.state.codec import Layout
from jaxrunner.state.request_arrays import updated_names

ARRANGE = Program("arrange")


class HostPrograms(Programs):
    """carry: arrays or shapes; see `Programs` for the others."""

    def __init__(
        self,
        model: Model,
        weights: Any,
        carry: DeviceCarry,
        ladder: Ladder,
        *,
        implementation: Implementation = None,
        custom: CustomSampling = NO_CUSTOM,
    ):
        super().__init__(model, weights, carry, ladder, implementation=implementation, custom=custom)
        self.sizes = carry.sizes
        self.num_rows = carry.num_rows
        self._layouts: dict[Bucket, Layout] = {}

    @property
    def others(self) -> list[Program]:
        sets = self.sizes.custom
        return super().others + ([ARRANGE] if sets else []) + ([COPY] if updated_names(sets) else [])

    def first(self, bucket: Bucket, *, has_grammar: bool = False) -> Program:
        """As of `Programs`; with functions of the user's nothing is fused, since they read tokens, which are no part of
        the step's upload."""
        return super().first(bucket, has_grammar=has_grammar or self.custom != NO_CUSTOM)

    def layout(self, bucket: Bucket) -> Layout:
        """The upload of a step."""
        if bucket not in self._layouts:
            self._layouts[bucket] = upload_layout(bucket, self.sizes)
        return self._layouts[bucket]

    @property
    def brought_bytes(self) -> int:
        """Lists, and tokens of two steps, since the next one is launched while one runs."""
        lists, tokens = self.sizes.list_sizes.width, self.sizes.max_model_len
        return 4 * (self.num_rows * lists + 2 * self.ladder.max_num_reqs * tokens)

    def reads_lists(self, tier: Tier) -> bool:
        """Whether the second half of a step takes the lists of the rows."""
        return bool(TIER_FEATURES[tier] & (Feature.CONSTRAINTS | Feature.LOGPROBS))

    def reads_tokens(self, tier: Tier) -> bool:
        """Whether the second half of a step takes the tokens of the rows."""
        return Feature.CONSTRAINTS in TIER_FEATURES[tier] or self.custom != NO_CUSTOM

    def function(self, program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if program.kind == "moves":
            return apply_moves, (self._state, vector(move_layout()))
        if program.kind == "arrange":
            return arrange, (self._state, vector(arrange_layout(self.num_rows, self.sizes.custom)))
        if program.kind == "copy":
            return copy_arrays, (self._state, jax.ShapeDtypeStruct((program.size,), jnp.int32))
        if program.kind == "finish":
            run = functools.partial(run_sampler, self.model, **self._finish_options(program))
            return run, (self._weights, self._state, self._half.last_tokens, *self._finish_shapes(program))
        if program.kind == "prompt":
            score = functools.partial(run_scores, self.model, num_rows=program.size)
            return score, (self._weights, self._state, self._half, self._lists, vector(score_layout(program.size)))
        assert program.bucket is not None
        upload = vector(self.layout(program.bucket))
        if program.kind == "begin":
            return self._forward(program.bucket), (self._weights, self._state, upload)
        options: dict[str, Any] = {"bucket": program.bucket, "implementation": self.implementation}
        return functools.partial(run_decode, self.model, **options), (self._weights, self._state, upload)

    def _forward(self, bucket: Bucket) -> Callable[..., Any]:
        options: dict[str, Any] = {"bucket": bucket, "num_rows": self.num_rows, "implementation": self.implementation}
        num_kept = self.ladder.max_num_tokens if bucket.kind == "mixed" else None
        return functools.partial(run_forward, self.model, num_kept=num_kept, **options)

    @functools.cached_property
    def _half(self) -> Any:
        """Shapes between the two halves of a step that keeps all tokens."""
        bucket = self.ladder.mixed_bucket(self.ladder.mixed[0], "greedy")
        upload = vector(self.layout(bucket))
        return jax.eval_shape(self._forward(bucket), self._weights, self._state, upload)[1]

    @property
    def _lists(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_rows, self.sizes.list_sizes.width), jnp.int32)

    def _finish_shapes(self, program: Program) -> tuple[jax.ShapeDtypeStruct | None, ...]:
        tokens = jax.ShapeDtypeStruct((program.size, self.sizes.max_model_len), jnp.int32)
        lists = self._lists if self.reads_lists(program.tier) else None
        return self._mask(program), lists, tokens if self.reads_tokens(program.tier) else None
