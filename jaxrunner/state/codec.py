"""The packed upload: named int32 sections in one vector, declared once and read by both sides.

The host packs a fresh vector for every call and never writes it again: JAX may alias a NumPy buffer instead of
copying it, so a later write would change what the device reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import CapacityError

A = TypeVar("A", jax.Array, np.ndarray)
ALIGNMENT = 64
"""Words between the starts of two sections are a multiple of this. XLA may hand a section to a GPU kernel as a pointer
into the upload, and a kernel's operand must lie at a multiple of 256 bytes."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """sections: (name, shape) in order, each at an aligned start. A vector of zeros is valid and does nothing."""

    sections: tuple[tuple[str, tuple[int, ...]], ...]

    @functools.cached_property
    def size(self) -> int:
        return sum(_room(shape) for _, shape in self.sections)

    @functools.cached_property
    def places(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Where each section lies in the vector, without the gap behind it, and its shape."""
        found, offset = {}, 0
        for name, shape in self.sections:
            found[name] = slice(offset, offset + math.prod(shape)), shape
            offset += _room(shape)
        return found

    def shape_of(self, section: str) -> tuple[int, ...]:
        return dict(self.sections)[section]

    def pack(self, values: Mapping[str, np.ndarray | int | list]) -> np.ndarray:
        """A fresh i32[size] vector, read-only. A section may be given shorter than its shape along axis 0. What is not
        given is zero.

        Raises CapacityError for a value that is longer than its section and OverflowError for one that does not fit
        32 bits (JAX itself would cut it without a word).
        """
        if unknown := values.keys() - self.places.keys():
            raise KeyError(f"no section is called {sorted(unknown)}")
        vector = np.zeros(self.size, np.int32)
        for name, value in values.items():
            where, shape = self.places[name]
            _fill(vector[where].reshape(shape), value, name)
        vector.flags.writeable = False
        return vector

    def with_rows(self, base: np.ndarray, section: str, rows: np.ndarray, *, counted_in: str) -> np.ndarray:
        """A fresh vector, read-only: a packed one with `rows`, i32[n, ...], at the beginning of a section, and n in
        another. Raises CapacityError if they are too many, TypeError if they are no int32."""
        where, shape = self.places[section]
        if rows.dtype != np.int32:
            raise TypeError(f"section {section!r} takes int32 here, got {rows.dtype}")
        if len(rows) > shape[0]:
            raise CapacityError(f"{len(rows)} entries do not fit the section {section!r} of {shape[0]}")
        vector, words = base.copy(), rows.ravel()
        vector[where.start : where.start + len(words)] = words
        vector[self.places[counted_in][0].start] = len(rows)
        vector.setflags(write=False)
        return vector

    def assemble(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """The vector of `pack`, made on the device, also inside a trace. A section left out is zero; one that is given
        has its whole shape."""
        if unknown := values.keys() - self.places.keys():
            raise KeyError(f"no section is called {sorted(unknown)}")
        parts = []
        for name, shape in self.sections:
            words = jnp.asarray(values.get(name, jnp.zeros(shape)), jnp.int32).reshape(math.prod(shape))
            parts.append(jnp.pad(words, (0, _room(shape) - words.shape[0])))
        return jnp.concatenate(parts)

    def unpack(self, vector: A) -> dict[str, A]:
        """The sections of a vector, inside or outside of a trace; of a NumPy vector they are views."""
        if vector.shape != (self.size,) or vector.dtype != np.int32:
            raise ValueError(f"expected i32[{self.size}], got {vector.dtype}{list(vector.shape)}")
        return {name: vector[where].reshape(shape) for name, (where, shape) in self.places.items()}


def _room(shape: tuple[int, ...]) -> int:
    """Words that a section takes, the gap behind it included."""
    return -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT


def _fill(section: np.ndarray, value: np.ndarray | int | list, name: str) -> None:
    array = np.asarray(value)
    if section.ndim == 0:
        array = array.reshape(())
    elif len(array) > len(section):
        raise CapacityError(f"{len(array)} entries do not fit the section {name!r} of {len(section)}")
    elif len(array) and array.shape[1:] != section.shape[1:]:
        raise ValueError(f"entries of section {name!r} have the shape {section.shape[1:]}, got {array.shape[1:]}")
    if array.dtype != np.int32 and array.size:
        if array.dtype.kind not in "iu":
            raise TypeError(f"section {name!r} takes integers, got {array.dtype}; floats go in bit-cast")
        if array.min() < -(2**31) or array.max() >= 2**31:
            raise OverflowError(f"section {name!r} holds a number that does not fit 32 bits")
    if section.ndim == 0:
        section[...] = array
    else:
        section[: len(array)] = array
