"""Rows of logits in chunks, as kernels read them: by the greatest of each, only those that can matter.

A score is a logit after `sampling.temperature.scale`. None is positive, so that the bits of their size, the magnitude,
ascend from the best to -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat

CHUNK = 512
NOTED_AT_ONCE = 8
INFINITE, MAX = 0x7F800000, 0x7FFFFFFF
"""The magnitude of -inf; above every one."""


def reason_against(vocab_size: int) -> str | None:
    """Why a kernel cannot take rows of so many ids, or None."""
    if vocab_size < CHUNK or vocab_size % 4:
        return f"it takes a vocabulary of {CHUNK} ids or more, a multiple of 4, not {vocab_size}"
    return None


def count_chunks(vocab_size: int) -> int:
    return -(-vocab_size // CHUNK)


def best_of_chunks(scores: jax.Array) -> jax.Array:
    """f32[B, N], the greatest of each chunk, NaN where it holds one. scores: f32[B, V], or logits."""
    padded = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % CHUNK)), constant_values=-jnp.inf)
    return jnp.max(padded.reshape(len(scores), -1, CHUNK), axis=2)


def magnitudes(scores: jax.Array, width: int) -> jax.Array:
    """i32[B, width], and MAX behind the scores. width: at least theirs."""
    bits = lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)
    return jnp.pad(bits, ((0, 0), (0, width - bits.shape[1])), constant_values=MAX)


def chunk_layout() -> Any:
    """Of a chunk in registers."""
    return compat.strided(CHUNK)


def vector(value: Any) -> jax.Array:
    """i32[CHUNK] of one number."""
    return spread(jnp.asarray(value, jnp.int32))


def spread(number: jax.Array) -> jax.Array:
    """[CHUNK] of one number of any type."""
    return compat.repeated(number, (CHUNK,), chunk_layout())


@dataclasses.dataclass(frozen=True)
class RowChunks:
    """The chunks of one row, in a kernel. logits: reference to [B, V] in GMEM. row: i32.

    The last chunk is as long as the others and so overlaps the one before it. The one behind the last is allowed, and
    is read as the last.
    """

    logits: Any
    row: Any

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    def start(self, chunk: Any) -> Any:
        return jnp.minimum(chunk * CHUNK, self.vocab_size - CHUNK)

    def ids(self, chunk: Any) -> jax.Array:
        return compat.iota(CHUNK) + vector(self.start(chunk))

    def is_own(self, chunk: Any, ids: jax.Array) -> jax.Array:
        """Which of the ids read for a chunk are its own, not those of the one before it; behind the last, none."""
        return ids >= vector(chunk * CHUNK)

    def load(self, chunk: Any) -> jax.Array:
        """Logits, of which nothing is computed before they are wanted: that would wait for them."""
        return compat.load(
            self.logits.at[self.row, compat.ds(self.start(chunk), CHUNK)], layout=chunk_layout(), optimized=False
        )


@dataclasses.dataclass(frozen=True)
class ScoredChunks(RowChunks):
    """Chunks whose logits are scaled to scores. offset, inverse: f32[CHUNK], the row's of `ScaledRows`, spread."""

    offset: jax.Array
    inverse: jax.Array

    def magnitudes(self, logits: jax.Array) -> jax.Array:
        scores = (logits.astype(jnp.float32) - self.offset) * self.inverse
        return lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)

    def read(self, chunk: Any, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(ids, magnitudes) of a chunk; what is not its own is infinite."""
        ids = self.ids(chunk)
        return ids, jnp.where(self.is_own(chunk, ids), self.magnitudes(logits), vector(INFINITE))


def list_chunks(
    listed: Any, magnitude_of: Any, places: int, stop: Any, *, first: Any = 0, behind: int, more: int
) -> jax.Array:
    """Lists the chunks that hold a magnitude below `stop`, in their order; returns how many.

    listed: i32[places + more] in SMEM; the `more` behind those listed become `behind`. magnitude_of: i32 in SMEM, the
    least of each of `places` chunks, a multiple of NOTED_AT_ONCE, from chunk `first` on.
    """
    compat.commit()  # no thread reads the old list any more

    def note(i, length):
        here = [i * NOTED_AT_ONCE + n for n in range(NOTED_AT_ONCE)]
        least = [magnitude_of[place] for place in here]
        for place, magnitude in zip(here, least, strict=True):
            listed[length] = first + place
            length = length + (magnitude < stop).astype(jnp.int32)
        return length

    length = lax.fori_loop(0, places // NOTED_AT_ONCE, note, jnp.int32(0))
    for i in range(more):
        listed[length + i] = jnp.int32(behind)
    compat.commit()
    return length
