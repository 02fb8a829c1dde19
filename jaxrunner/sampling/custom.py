"""Logits processors and samplers of the user's own: plain JAX functions, compiled into the step.

    def processor(logits, context): ...           # f32[B, V] -> f32[B, V], or (that, {name: new value, ...})
    def sampler(scores, context, keys): ...        # f32[B, V] -> i32[B], or (that, {name: new value, ...})

    LLM(logits_processors=(processor,), sampler=sampler)  # so for RunnerConfig, step and decode_loop

They are traced once for each executable, see a whole batch in any order, and may use whatever JAX has; what they close
over is a constant of the executable. A plain function serves every request. With `LogitsProcessor` and `Sampler` a
function gets arrays of its own for each request, which arrive as data and so never compile anything, and serves the
requests that ask for it: `SamplingParams(extra_args={"name": {"array": value}})`.

A processor comes after bad words and before the thinking budget, several in their order. What was forbidden before it
stays forbidden. A sampler takes the place of the draw from what the filters left; requests at temperature 0 keep their
argmax.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.errors import AdmissionError, ImplementationError
from jaxrunner.sampling.history import History
from jaxrunner.sampling.random import USER, row_keys
from jaxrunner.state.request_arrays import ArraySet, ArraySets, RequestArray


class SamplingContext(NamedTuple):
    """What a user's function is told of the batch's rows, [B] each.

    rows: i32, a number that a request has to itself for its life, in a state that of its row; 0 in padding. The batch's
    order means nothing. position: i32, index the new token will have in its request. samples: bool, whether a token is
    sampled: no prefill that goes on, no padding. seed: i32[B, 2], words of the requests' seeds. arrays: name ->
    [B, *shape], the function's own arrays, by the names it declared. history: see the properties and methods.
    """

    history: History
    rows: jax.Array
    position: jax.Array
    samples: jax.Array
    seed: jax.Array
    arrays: Mapping[str, jax.Array] = {}

    @property
    def prompt_len(self) -> Int32[Array, "B"]:
        return self.history.prompt_len

    def tokens(self) -> Int32[Array, "B L"]:
        """Prompt and output of each request so far, -1 from its end on. L is the state's max_model_len."""
        tokens = self.history.of_rows()
        return jnp.where(jnp.arange(tokens.shape[1]) < self.position[:, None], tokens, -1)

    def last(self, count: int) -> Int32[Array, "B N"]:
        """The newest `count` tokens of each request, the newest last; -1 before its beginning."""
        index = self.position[:, None] - count + jnp.arange(count)
        return jnp.where(index >= 0, self.history.at(index), -1)

    def keys(self, number: int = 0) -> jax.Array:
        """A typed key for each row, of (seed, position) alone; independent of the draw and of every other `number`."""
        return row_keys(self.seed, self.position, stream=USER + number)


@dataclasses.dataclass(frozen=True)
class _Custom:
    """What a processor and a sampler have in common."""

    fn: Any  # checked below, where the error can say more
    name: str = ""
    arrays: tuple[RequestArray, ...] = ()
    every_request: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ImplementationError(f"a {self.kind} is a function, not {self.fn!r}")
        object.__setattr__(self, "name", self.name or getattr(self.fn, "__name__", type(self.fn).__name__))
        object.__setattr__(self, "arrays", tuple(self.arrays))
        _check_signature(self)
        if self.is_declared:
            _ = self.declared

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def is_declared(self) -> bool:
        """Whether a state has to hold something for it."""
        return bool(self.arrays) or not self.every_request

    @property
    def declared(self) -> ArraySet:
        return ArraySet(self.name, self.arrays, self.every_request)

    def view(self, context: SamplingContext, values: Mapping[str, jax.Array]) -> SamplingContext:
        return context._replace(arrays={array.name: values[f"{self.name}.{array.name}"] for array in self.arrays})

    def asks(self, values: Mapping[str, jax.Array]) -> jax.Array | None:
        """bool[B], None for all."""
        return None if self.every_request else values[self.name]

    def new_values(
        self, updates: Mapping[str, Any], mine: SamplingContext, asks: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Every updated array's new value by its name in `state.extras`, the old one where the function gave none, and
        in rows that do not ask."""
        updated = {array.name: array for array in self.arrays if array.updated}
        if unknown := sorted(updates.keys() - updated.keys()):
            raise ImplementationError(
                f"{self.kind} {self.name} updates {unknown[0]!r}; declare RequestArray({unknown[0]!r}, updated=True)"
            )
        found = {}
        for name in updated:
            old = mine.arrays[name]
            new = jnp.asarray(updates.get(name, old))
            if (new.shape, new.dtype) != (old.shape, old.dtype):
                raise ImplementationError(
                    f"{self.kind} {self.name} gave {name!r} as {new.dtype}{list(new.shape)}; "
                    f"expected {old.dtype}{list(old.shape)}"
                )
            if asks is not None:
                new = jnp.where(asks.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            found[f"{self.name}.{name}"] = new
        return found

    def check_result(self, result: Any, shape: tuple[int, ...], dtype: Any) -> None:
        found = getattr(result, "shape", None), getattr(result, "dtype", None)
        if found != (shape, dtype):
            what = f"{found[1]}{list(found[0])}" if found[0] is not None else type(result).__name__
            raise ImplementationError(
                f"{self.kind} {self.name} gave {what}; expected {jnp.dtype(dtype)}{list(shape)}, or a pair of that and "
                "{name: new value}"
            )


class LogitsProcessor(_Custom):
    """A function of (logits f32[B, V], context) that returns logits, or logits and {name: new value}.

    fn: the function. name: for extra_args and errors, by default the function's. arrays: declared for each request.
    every_request: serve all requests; else those whose extra_args name it, and the others keep their logits' very bits.
    """

    def apply(
        self, logits: Float32[Array, "B V"], context: SamplingContext, values: Mapping[str, jax.Array]
    ) -> tuple[Float32[Array, "B V"], dict[str, jax.Array]]:
        """(logits afterwards, new values of its updated arrays)."""
        mine = self.view(context, values)
        result, updates = _pair(self.fn(logits, mine))
        self.check_result(result, logits.shape, logits.dtype)
        changes, asks = logits != -jnp.inf, self.asks(values)
        if asks is not None:
            changes &= asks[:, None]
        return jnp.where(changes, result, logits), self.new_values(updates, mine, asks)


class Sampler(_Custom):
    """A function of (scores f32[B, V], context, keys) that returns token ids i32[B], or those and {name: new value}.

    scores: logits / temperature after the filters, at most 0, -inf where an id was dropped. keys: a typed key for each
    row, the one that the built-in draw uses. An id that was dropped, or that is none, ends its request with an error.
    fn, name, arrays, every_request: as of a `LogitsProcessor`.
    """

    def draw(
        self, scores: Float32[Array, "B V"], context: SamplingContext, keys: jax.Array, values: Mapping[str, jax.Array]
    ) -> tuple[Int32[Array, "B"], dict[str, jax.Array]]:
        """(token ids, new values of its updated arrays)."""
        mine = self.view(context, values)
        result, updates = _pair(self.fn(scores, mine, keys))
        self.check_result(result, scores.shape[:1], jnp.int32)
        return result, self.new_values(updates, mine, self.asks(values))


@dataclasses.dataclass(frozen=True)
class CustomSampling:
    """All of the user's functions in one step. Hashable, a static part of an executable."""

    logits_processors: tuple[LogitsProcessor, ...] = ()
    sampler: Sampler | None = None

    @classmethod
    def of(cls, logits_processors: Any = (), sampler: Any = None) -> CustomSampling:
        """From what a user gives: functions or objects, one processor or several."""
        given = logits_processors if isinstance(logits_processors, Iterable) else (logits_processors,)
        processors = [p if isinstance(p, LogitsProcessor) else LogitsProcessor(p, every_request=True) for p in given]
        is_plain = sampler is not None and not isinstance(sampler, Sampler)
        return cls(tuple(processors), Sampler(sampler, every_request=True) if is_plain else sampler)

    @property
    def declared(self) -> ArraySets:
        """What a state has to hold for them."""
        every = (*self.logits_processors, *((self.sampler,) if self.sampler else ()))
        return tuple(custom.declared for custom in every if custom.is_declared)

    @property
    def names(self) -> list[str]:
        """For reports and records."""
        sampler = [f"sampler {self.sampler.name}"] if self.sampler else []
        return [p.name for p in self.logits_processors] + sampler

    def check_state(self, sets: ArraySets) -> None:
        """Raises AdmissionError unless the state was made for the same processors and sampler."""
        if lacking := [owned.owner for owned in self.declared if owned not in sets]:
            raise AdmissionError(
                f"the state holds no arrays of {lacking[0]}; make it with the same processors and sampler: "
                "init_state(..., logits_processors=..., sampler=...)"
            )
        if unused := [owned.owner for owned in sets if owned not in self.declared]:
            raise AdmissionError(
                f"the state holds arrays of {unused[0]}, for which requests may ask, but the step was not given it: "
                "pass the same logits_processors=... and sampler=..."
            )


NO_CUSTOM = CustomSampling()


class CustomRun(NamedTuple):
    """The user's functions with what they are told in one step. values: see `request_arrays.current`."""

    custom: CustomSampling
    context: SamplingContext
    values: Mapping[str, jax.Array]

    def process(
        self, logits: Float32[Array, "B V"], *, asked: bool
    ) -> tuple[Float32[Array, "B V"], dict[str, jax.Array]]:
        """(logits after every processor, new values of updated arrays). asked: some rows may ask for one."""
        updates: dict[str, jax.Array] = {}
        for processor in self.custom.logits_processors:
            if processor.every_request or asked:
                logits, new = processor.apply(logits, self.context, self.values)
                updates |= new
        return logits, updates

    def draw(
        self, scores: Float32[Array, "B V"], drawn: Int32[Array, "B"], keys: jax.Array, *, asked: bool
    ) -> tuple[Int32[Array, "B"], Bool[Array, "B"], dict[str, jax.Array]]:
        """(token ids, rows whose id is none or was dropped, new values of updated arrays).

        drawn: what rows have that do not ask for the sampler. keys: of the rows' draws. asked: as in `process`.
        """
        sampler = self.custom.sampler
        if sampler is None or not (sampler.every_request or asked):
            return drawn, jnp.zeros(drawn.shape, bool), {}
        own, updates = sampler.draw(scores, self.context, keys, self.values)
        is_id = (own >= 0) & (own < scores.shape[1])
        inside = jnp.where(is_id, own, 0)
        score = jnp.take_along_axis(scores, inside[:, None], axis=1)[:, 0]
        is_lost = ~is_id | (score == -jnp.inf)
        if (asks := sampler.asks(self.values)) is not None:
            inside, is_lost = jnp.where(asks, inside, drawn), is_lost & asks
        return inside, is_lost, updates


def _pair(result: Any) -> tuple[Any, Mapping[str, Any]]:
    return result if isinstance(result, tuple) and len(result) == 2 else (result, {})


def _check_signature(custom: _Custom) -> None:
    names = ("scores", "context", "keys") if isinstance(custom, Sampler) else ("logits", "context")
    try:
        signature = inspect.signature(custom.fn)
    except (TypeError, ValueError):  # some callables have none; calling them tells
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        raise ImplementationError(
            f"a {custom.kind} is called as ({', '.join(names)}), but {custom.name} takes {signature}: {error}"
        ) from None
