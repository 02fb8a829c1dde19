"""The programs a runner can compile: which they are for a ladder, and how each is lowered from shapes alone."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrunner.compile.buckets import Bucket, Tier, forbids_ids
from jaxrunner.compile.ladder import FUSED_REQS, Ladder, geometric
from jaxrunner.models.model import Model
from jaxrunner.pallas.custom_attention import custom
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import NO_CUSTOM, CustomSampling
from jaxrunner.sampling.packed_bits import num_words
from jaxrunner.stages.inputs import step_layout
from jaxrunner.stages.prompt_logprobs import PROMPT_ROWS, prompt_layout, run_prompt_logprobs
from jaxrunner.stages.step import begin_step, finish_step, step
from jaxrunner.state.admission import ENTRIES_PER_CALL, admit_layout, apply_admit
from jaxrunner.state.block_moves import MOVES_PER_CALL, apply_moves, move_layout
from jaxrunner.state.codec import Layout
from jaxrunner.state.request_arrays import updated_names
from jaxrunner.state.row_copies import copy_rows
from jaxrunner.state.runner_state import RunnerState

ADMIT_FIRST, ADMIT_FACTOR = 128, 8


@dataclasses.dataclass(frozen=True)
class Program:
    """kind "step": a whole fused greedy decode in `bucket`. "begin": the first three stages of any other step, without
    a tier. "finish": sample and commit for `size` requests at `tier`, under the masks of their grammars; what forbids
    nothing is a mask too, so no other program is there for it. "admit": rows and prompts, `size` tokens.
    "moves": KV blocks zeroed and copied, `size` of each. "copy": what has to be kept of `size` preempted rows.
    "prompt": log-probabilities of `size` prompt tokens. "arrange": arrays of requests follow a batch whose rows moved.
    """

    kind: Literal["step", "begin", "finish", "admit", "moves", "copy", "prompt", "arrange"]
    bucket: Bucket | None = None
    size: int = 0
    tier: Tier = "greedy"

    @property
    def num_tokens(self) -> int:
        return self.bucket.num_tokens if self.bucket else 0

    def __str__(self) -> str:
        if self.bucket is not None:
            return str(self.bucket) if self.kind == "step" else f"begin {str(self.bucket).rpartition('/')[0]}"
        return f"{self.kind}[{self.size}]" + (f"/{self.tier}" if self.kind == "finish" else "")


@functools.cache
def _first(bucket: Bucket, fused: bool) -> Program:
    if bucket.kind == "decode" and bucket.tier == "greedy" and fused:
        return Program("step", bucket)
    return Program("begin", bucket.replace(tier="greedy"))


@functools.cache
def _finish(size: int, tier: Tier) -> Program:
    return Program("finish", size=size, tier=tier)


FIRST_TOKEN_PROGRAMS = 4
"""So many of `ProgramSet.by_urgency`, the first ones, serve any greedy request: prefill, admission, draw, decode."""
COPY = Program("copy", size=ENTRIES_PER_CALL)


class Programs(abc.ABC):
    """All programs of one ladder over one model and what a runner keeps on the device. Holds shapes, no arrays.

    weights, state: pytrees of arrays or ShapeDtypeStructs. The state is donated by every program. admit_sizes: of the
    programs by which requests enter the state. custom: the user's logits processors and sampler.
    """

    def __init__(
        self,
        model: Model,
        weights: Any,
        state: Any,
        ladder: Ladder,
        *,
        admit_sizes: tuple[int, ...] = (),
        implementation: Implementation = None,
        custom: CustomSampling = NO_CUSTOM,
    ):
        self.model = model
        self.ladder = ladder
        self.implementation = implementation
        self.custom = custom
        self._has_custom = custom != NO_CUSTOM
        self._weights, self._state = _shapes(weights), _shapes(state)
        self._admit_sizes = admit_sizes

    @property
    def state_shapes(self) -> Any:
        """What the runner keeps on the device, as shapes."""
        return self._state

    @property
    def brought_bytes(self) -> int:
        """Of what steps bring to the device beside uploads and masks: it lies there beside the state."""
        return 0

    @abc.abstractmethod
    def function(self, program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """(what the program computes, the shapes of its arguments)."""

    def admit_for(
        self, num_tokens: int, num_block_writes: int, num_list_writes: int = 0, num_arrays: int = 0
    ) -> Program | None:
        """The smallest admit program that holds this much; None if none does, or if requests enter without one."""
        return None

    @property
    def others(self) -> list[Program]:
        """Programs that are not for every step."""
        return [Program("moves", size=MOVES_PER_CALL), self.prompt_logprobs]

    def all(self) -> list[Program]:
        """Every program, the ones a first request needs first."""
        admits = [Program("admit", size=n) for n in self._admit_sizes]
        ragged = [self.ladder.mixed_bucket(n, tier) for tier in self.ladder.tiers for n in self.ladder.mixed]
        finishes = [Program("finish", size=n, tier=t) for t in self.ladder.tiers for n in self.ladder.finish_rungs(t)]
        decodes = [self.ladder.decode_bucket(n, tier) for tier in self.ladder.tiers for n in self.ladder.decode]
        first = dict.fromkeys(self.first(bucket) for bucket in ragged)
        return [*admits, *first, *finishes, *self.others, *dict.fromkeys(self.first(bucket) for bucket in decodes)]

    def by_urgency(self) -> list[Program]:
        """Every program, in the order in which an engine can use them before all are there: first the largest of each
        kind and tier, which with the others of its kind missing can do their work."""
        ladder, most = self.ladder, self.ladder.max_num_reqs
        prefill = self.first(ladder.mixed_bucket(ladder.max_num_tokens, "greedy"))
        largest = [prefill, *(Program("admit", size=n) for n in self._admit_sizes[-1:])]
        for tier in ladder.tiers:
            largest += [self.finish(most, tier), self.first(ladder.decode_bucket(most, tier))]
        return list(dict.fromkeys([*largest, Program("moves", size=MOVES_PER_CALL), *self.all()]))

    def first(self, bucket: Bucket, *, has_grammar: bool = False) -> Program:
        """What a step in `bucket` begins with: the fused step of a greedy decode of up to FUSED_REQS requests, else the
        first half, which every tier shares and `finish` completes. has_grammar: masks come while the first half runs,
        so nothing is fused. With `jax_debug_nans` on neither, so that the hidden states are a result, which JAX looks
        at."""
        fused = bucket.num_reqs <= FUSED_REQS and not has_grammar and not jax.config.jax_debug_nans
        return _first(bucket, fused)

    def may_forbid(self, tier: Tier, *, has_grammar: bool) -> bool:
        """Whether anything can forbid ids to a request that is sampled in this tier, see `StepOutput.failures`."""
        return has_grammar or self._has_custom or forbids_ids(tier)

    def finish(self, num_reqs: int, tier: Tier) -> Program:
        return _finish(self.ladder.finish_rung(num_reqs, tier), tier)

    @property
    def prompt_logprobs(self) -> Program:
        return Program("prompt", size=min(PROMPT_ROWS, self.ladder.max_num_tokens))

    def larger(self, program: Program) -> list[Program]:
        """Programs that can stand in for `program`, in ascending order of size."""
        if program.bucket is not None:
            larger = self.ladder.larger(program.bucket)
            return [self.first(b) if program.kind == "step" else Program("begin", b) for b in larger]
        if program.kind in ("moves", "copy", "prompt", "arrange"):
            return []
        sizes = self.ladder.finish_rungs(program.tier) if program.kind == "finish" else self._admit_sizes
        return [dataclasses.replace(program, size=n) for n in sizes if n > program.size]

    def trace(self, program: Program) -> jax.stages.Traced:
        """One program, ready to be lowered. No array is made. With `jax_debug_nans` on nothing is donated."""
        run, arguments = self.function(program)
        return self.jit(run, arguments).trace(*arguments)

    def jit(self, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """`jax.jit` of something that takes the arguments of a program, of which it donates the state."""
        return jax.jit(run, donate_argnums=_place_of(self._state, arguments))

    def identity(self, program: Program) -> list[str] | None:
        """What decides `program` beside the machine and the versions, or None where text cannot say it: an attention, a
        logits processor or a sampler of the user's own is known by its code alone."""
        if custom(self.implementation) or self.custom != NO_CUSTOM:
            return None
        leaves, tree = jax.tree.flatten((self._weights, self._state))
        shapes = " ".join(f"{x.dtype}{list(x.shape)}" for x in leaves)
        return [*map(repr, (program, self.model, self.implementation, self.ladder.max_num_reqs)), str(tree), shapes]

    def _finish_options(self, program: Program) -> dict[str, Any]:
        """Of the second half of a step, which are static."""
        options: dict[str, Any] = {"tier": program.tier, "num_reqs": program.size, "custom": self.custom}
        return options | {"implementation": self.implementation}

    def _mask(self, program: Program) -> jax.ShapeDtypeStruct:
        """The masks of grammars that the second half of a step takes."""
        return jax.ShapeDtypeStruct((program.size, num_words(self.model.vocab_size)), jnp.uint32)


class ProgramSet(Programs):
    """The programs of the runner that keeps its requests on the device; see `Programs`."""

    def __init__(
        self,
        model: Model,
        weights: Any,
        state: RunnerState,
        ladder: Ladder,
        *,
        implementation: Implementation = None,
        custom: CustomSampling = NO_CUSTOM,
    ):
        sizes = geometric(min(ADMIT_FIRST, state.max_model_len), state.max_model_len, ADMIT_FACTOR)
        options: dict[str, Any] = {"implementation": implementation, "custom": custom}
        super().__init__(model, weights, state, ladder, admit_sizes=sizes, **options)
        self.groups = state.tables.groups
        self._draft_slots = state.num_draft_tokens
        self._list_width = state.sampling.sizes.width
        self._admit_layouts: dict[Program, Layout] = {}

    @property
    def others(self) -> list[Program]:
        return super().others + ([COPY] if updated_names(self._state.sampling.custom) else [])

    def admit_for(
        self, num_tokens: int, num_block_writes: int, num_list_writes: int = 0, num_arrays: int = 0
    ) -> Program | None:
        for size in self._admit_sizes:
            program = Program("admit", size=size)
            layout = self.admit_layout(program)
            needed = {"tokens": num_tokens, "block_writes": num_block_writes, "list_writes": num_list_writes}
            if num_arrays:
                needed["array_row"] = num_arrays
            if all(layout.shape_of(section)[0] >= count for section, count in needed.items()):
                return program
        return None

    def step_layout(self, bucket: Bucket) -> Layout:
        return step_layout(bucket, self.groups, self._draft_slots)

    def admit_layout(self, program: Program) -> Layout:
        """Room for `size` tokens and for the block tables of as many, a partly filled block for each entry; and for as
        many words of lists, in the largest program for the lists of any one request."""
        if program not in self._admit_layouts:
            self._admit_layouts[program] = self._make_admit_layout(program)
        return self._admit_layouts[program]

    def _make_admit_layout(self, program: Program) -> Layout:
        blocks = sum(-(-program.size // g.block_size) + g.blocks_per_kv_block * ENTRIES_PER_CALL for g in self.groups)
        is_largest = program.size == self._admit_sizes[-1]
        lists = self._list_width if is_largest else min(program.size, self._list_width)
        return admit_layout(program.size, blocks, num_list_writes=lists, custom=self._state.sampling.custom)

    def function(self, program: Program) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if program.kind == "admit":
            layout = self.admit_layout(program)
            return functools.partial(apply_admit, layout=layout), (self._state, vector(layout))
        if program.kind == "moves":
            return apply_moves, (self._state, vector(move_layout()))
        if program.kind == "copy":
            return copy_rows, (self._state, jax.ShapeDtypeStruct((program.size,), jnp.int32))
        if program.kind == "finish":
            arguments = (self._weights, self._state, self._pending.last_tokens, self._mask(program))
            return self._finish(program), arguments
        if program.kind == "prompt":
            run = functools.partial(run_prompt_logprobs, self.model, num_rows=program.size)
            return run, (self._weights, self._state, self._pending, vector(prompt_layout(program.size)))
        assert program.bucket is not None
        upload = vector(self.step_layout(program.bucket))
        run = self._begin(program.bucket) if program.kind == "begin" else self._step(program.bucket)
        return run, (self._weights, self._state, upload)

    @functools.cached_property
    def _pending(self) -> Any:
        return self.pending_shapes(self.ladder.mixed_bucket(self.ladder.mixed[0], "greedy"))

    def pending_shapes(self, bucket: Bucket) -> Any:
        """Shapes between the two halves of a step in `bucket`: the same for every bucket of a kind."""
        upload = vector(self.step_layout(bucket))
        return jax.eval_shape(self._begin(bucket), self._weights, self._state, upload)[1]

    def _step(self, bucket: Bucket):
        options: dict[str, Any] = {"logits_processors": self.custom.logits_processors, "sampler": self.custom.sampler}
        return functools.partial(step, self.model, bucket=bucket, implementation=self.implementation, **options)

    def _finish(self, program: Program):
        options = self._finish_options(program)

        def finish(weights, state, pending, grammar_bitmask):
            return finish_step(self.model, weights, state, pending, grammar_bitmask=grammar_bitmask, **options)

        return finish

    def _begin(self, bucket: Bucket):
        return functools.partial(
            begin_step,
            self.model,
            bucket=bucket,
            pending_reqs=self.ladder.max_num_reqs,
            pending_tokens=self.ladder.max_num_tokens if bucket.kind == "mixed" else None,
            implementation=self.implementation,
        )


def _place_of(argument: Any, arguments: tuple[Any, ...]) -> int:
    return next(i for i, a in enumerate(arguments) if a is argument)


def vector(layout: Layout) -> jax.ShapeDtypeStruct:
    """The shape of an upload."""
    return jax.ShapeDtypeStruct((layout.size,), jnp.int32)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
