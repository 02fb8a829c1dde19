"""Arrays that a user's logits processor or sampler has for each request: declared once, held in `state.extras`.

Of a processor "watermark" with an array "key", `state.extras["watermark.key"]` has one row a request, and
`state.extras["watermark"]`, bool, says which requests ask for it. An array that the step updates has a second axis, its
newest GENERATIONS values: the one that belongs to a request of n tokens is at n % GENERATIONS. So a request that was
preempted while its last token was still on its way, and comes back without it, also finds the value it had before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrunner.errors import AdmissionError
from jaxrunner.sampling_params import SamplingParams

GENERATIONS = 2
"""Values of an updated array that are kept: the newest, and one for a step whose token has not arrived."""
DTYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32")
WHERE_DECLARED = "logits_processors=... or sampler=... (of LLM, RunnerConfig and init_state)"


@dataclasses.dataclass(frozen=True)
class RequestArray:
    """One array of each request.

    default: a number for all its elements; None where every request that asks has to bring the array.
    updated: the processor returns a new value in each step that samples a token for the request.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    default: float | None = 0
    updated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        if not self.name.isidentifier():
            raise AdmissionError(f"a request array is called {self.name!r}; its name must be an identifier")
        if self.dtype not in DTYPES:
            raise AdmissionError(f"request array {self.name!r} is {self.dtype}; use one of {', '.join(DTYPES)}")
        if min(self.shape, default=1) < 1:
            raise AdmissionError(f"request array {self.name!r} has the shape {self.shape}; each length is at least 1")
        if self.default is not None:
            self.value(self.default, f"the default of request array {self.name!r}", fill=True)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a request's row in `state.extras`."""
        return (GENERATIONS, *self.shape) if self.updated else self.shape

    def value(self, given: Any, what: str, *, fill: bool = False) -> np.ndarray:
        """`given` in this array's shape and dtype. Raises AdmissionError, beginning with `what`, for another shape or a
        number that the dtype cannot hold. fill: one number stands for all elements."""
        dtype = jnp.dtype(self.dtype)
        try:
            found = np.asarray(given)
        except ValueError as error:
            raise AdmissionError(f"{what} is no array: {error}") from error
        if fill:
            found = np.broadcast_to(found, self.shape)
        if found.shape != self.shape:
            raise AdmissionError(f"{what} has the shape {found.shape}; expected {self.shape}")
        kinds = {np.bool_: np.bool_, np.integer: np.integer, np.floating: np.number}
        kind = next(kinds[k] for k in kinds if jnp.issubdtype(dtype, k))
        if not jnp.issubdtype(found.dtype, kind) or jnp.issubdtype(found.dtype, np.complexfloating):
            raise AdmissionError(f"{what} is {found.dtype}; expected {self.dtype}")
        with np.errstate(over="ignore"):
            stored = found.astype(dtype)
        is_lost = stored != found if kind is np.integer else np.isinf(stored) & np.isfinite(found.astype(np.float64))
        if kind is not np.bool_ and np.any(is_lost):
            raise AdmissionError(f"{what} holds {found[is_lost].flat[0]}, which does not fit {self.dtype}")
        return stored


@dataclasses.dataclass(frozen=True)
class ArraySet:
    """The arrays of one owner, a logits processor or a sampler. every_request: it serves requests that do not ask."""

    owner: str
    arrays: tuple[RequestArray, ...] = ()
    every_request: bool = False

    def __post_init__(self) -> None:
        if not self.owner.isidentifier():
            raise AdmissionError(
                f"a logits processor or sampler is called {self.owner!r}; give it a name=, which must be an identifier"
            )
        names = [array.name for array in self.arrays]
        if len(set(names)) != len(names):
            raise AdmissionError(f"{self.owner!r} declares an array twice: {names}")

    def asked_by(self, params: SamplingParams) -> bool:
        return self.every_request or self.owner in (params.extra_args or {})

    @property
    def is_updated(self) -> bool:
        return any(array.updated for array in self.arrays)


ArraySets = tuple[ArraySet, ...]


def row_shapes(sets: ArraySets) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Name in `state.extras` -> (shape of a row, dtype)."""
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    for owned in sets:
        if not owned.every_request:
            found[owned.owner] = ((), jnp.dtype(bool))
        for array in owned.arrays:
            found[f"{owned.owner}.{array.name}"] = (array.row_shape, jnp.dtype(array.dtype))
    return found


def empty_extras(sets: ArraySets, num_rows: int) -> dict[str, jax.Array]:
    """What a new state holds for them. Raises AdmissionError where two owners have one name."""
    owners = [owned.owner for owned in sets]
    if len(set(owners)) != len(owners):
        raise AdmissionError(f"two logits processors or samplers have the same name: {owners}")
    return {name: jnp.zeros((num_rows, *shape), dtype) for name, (shape, dtype) in row_shapes(sets).items()}


def check_extra_args(params: SamplingParams, sets: ArraySets, where: str = "request") -> None:
    """Raises AdmissionError, naming the owner and the array, for extra_args that no owner declares, that have another
    shape or dtype, or that leave out an array without a default."""
    _given_values(params, sets, where)


def request_rows(
    params: SamplingParams, sets: ArraySets, num_tokens: int, kept: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """Name in `state.extras` -> the whole row of a request of `num_tokens` tokens, as it is admitted.

    kept: values of updated arrays that the request had when it was preempted, by their names in `state.extras`.
    """
    rows: dict[str, np.ndarray] = {}
    values = _given_values(params, sets, "request") | dict(kept or {})
    for owned in sets:
        if not owned.every_request:
            rows[owned.owner] = np.array(owned.asked_by(params))
        for array in owned.arrays:
            name = f"{owned.owner}.{array.name}"
            row = np.zeros(array.row_shape, jnp.dtype(array.dtype))
            row[num_tokens % GENERATIONS if array.updated else ...] = values[name]
            rows[name] = row
    return rows


def current(extras: Mapping[str, jax.Array], sets: ArraySets, rows: jax.Array, num_tokens: jax.Array) -> dict:
    """Name in `state.extras` -> the values of some rows, [B, *shape]. num_tokens: i32[B], tokens of their requests."""
    found = {}
    for owned in sets:
        if not owned.every_request:
            found[owned.owner] = extras[owned.owner][rows]
        for array in owned.arrays:
            name = f"{owned.owner}.{array.name}"
            found[name] = extras[name][rows, num_tokens % GENERATIONS] if array.updated else extras[name][rows]
    return found


def with_updates(
    extras: Mapping[str, Any], updates: Mapping[str, jax.Array], rows: jax.Array, num_tokens: jax.Array
) -> dict[str, Any]:
    """`extras` with new values of updated arrays. rows: i32[B]; one out of range writes nothing. num_tokens: i32[B],
    tokens that the requests have from now on."""
    written = {
        name: extras[name].at[rows, num_tokens % GENERATIONS].set(value, mode="drop") for name, value in updates.items()
    }
    return {**extras, **written}


def to_words(row: np.ndarray) -> np.ndarray:
    """A row as i32 words, one an element, for the upload."""
    flat = row.reshape(-1)
    if jnp.issubdtype(flat.dtype, np.floating):
        return flat.astype(np.float32).view(np.int32)
    return flat.astype(np.uint32).view(np.int32) if flat.dtype.kind == "u" else flat.astype(np.int32)


def from_words(words: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What `to_words` made, of several rows: i32[n, W] -> dtype[n, *shape]."""
    if jnp.issubdtype(dtype, np.floating):
        words = lax.bitcast_convert_type(words, jnp.float32)
    elif jnp.issubdtype(dtype, np.unsignedinteger):
        words = lax.bitcast_convert_type(words, jnp.uint32)
    return words.astype(dtype).reshape(len(words), *shape)


def updated_names(sets: ArraySets) -> list[str]:
    """Names in `state.extras` of the arrays that steps update."""
    return [f"{owned.owner}.{array.name}" for owned in sets for array in owned.arrays if array.updated]


def num_words(sets: ArraySets) -> dict[str, int]:
    """Name in `state.extras` -> words of a row."""
    return {name: math.prod(shape) for name, (shape, _) in row_shapes(sets).items()}


def _given_values(params: SamplingParams, sets: ArraySets, where: str) -> dict[str, np.ndarray]:
    given = params.extra_args or {}
    owners = {owned.owner: owned for owned in sets}
    for owner, values in given.items():
        if owner not in owners:
            has = f"there are {', '.join(owners)}" if owners else f"there is none; declare it by {WHERE_DECLARED}"
            raise AdmissionError(f"{where}: extra_args asks for {owner!r}, no logits processor or sampler here: {has}")
        names = [array.name for array in owners[owner].arrays]
        if unknown := sorted(set(values) - set(names)):
            raise AdmissionError(f"{where}: extra_args[{owner!r}] has {unknown[0]!r}; {owner} takes {names}")
    found = {}
    for owned in sets:
        for array in owned.arrays:
            value = given.get(owned.owner, {}).get(array.name, array.default)
            if value is None and owned.asked_by(params):
                raise AdmissionError(
                    f"{where}: {owned.owner} needs {array.name!r}, which has no default: give it as "
                    f"extra_args={{{owned.owner!r}: {{{array.name!r}: ...}}}}"
                )
            is_default = array.name not in given.get(owned.owner, {})
            what = f"{where}: extra_args[{owned.owner!r}][{array.name!r}]"
            found[f"{owned.owner}.{array.name}"] = array.value(0 if value is None else value, what, fill=is_default)
    return found
