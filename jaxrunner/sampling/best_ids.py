"""The few best ids of a row in their order, exactly and without sorting the vocabulary.

Order: the higher score first; equal scores by id, the lowest first. The row is cut into chunks: the `count` best ids
lie in the `count` chunks with the highest maxima, because each of these maxima stands before everything in another
chunk. So one pass over the row leaves `count` chunks, two more cuts leave a few hundred ids, and those are ranked by
comparing each with each other. What a GPU does is one pass over the row and a dozen small kernels; a sort would read
and write the row dozens of times. Where Mosaic runs, one kernel takes the place of all but the pass.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

CHUNKS = (512, 32, 4)
"""Sizes of the cuts. With 20 of 128,256 ids they leave 251, 320 and 160 maxima and at last 80 ids to be ranked."""
NO_ID = -1


def best_ids(
    scores: Float[Array, "B V"], count: int, maxima: Float32[Array, "B M"] | None = None
) -> Int32[Array, "B N"]:
    """The ids of the `count` best scores of each row, 1 <= count <= V, best first. A NaN counts as -inf.

    maxima: of `filters.chunk_maxima`; with them a kernel finds the ids.
    """
    if maxima is not None:
        from jaxrunner.pallas.best_ids_mosaic import best_ids_mosaic

        return best_ids_mosaic(lax.stop_gradient(scores), lax.stop_gradient(maxima), count)
    kept, ids = scores.astype(jnp.float32), None
    for size in CHUNKS:
        if kept.shape[1] > count * size:
            place = _best_chunks(kept, count, size)
            ids = place if ids is None else jnp.take_along_axis(ids, place, axis=1, mode="fill", fill_value=NO_ID)
            # Gathered from what is there already: a padded copy of the row would be another one to write and to read.
            kept = jnp.take_along_axis(kept, place, axis=1, mode="fill", fill_value=-jnp.inf)
    if ids is None:
        ids = jnp.broadcast_to(jnp.arange(kept.shape[1], dtype=jnp.int32), kept.shape)
    return _by_place(ids, _ranks(kept), count)


def _best_chunks(scores: Float32[Array, "B W"], count: int, size: int) -> Int32[Array, "B M"]:
    """Places in the chunks that hold the best, ascending, so that they keep telling lower ids from higher.

    The last chunk may reach past the end of the row. What is there comes last among equals, so that none of it is
    among the best.
    """
    rows, width = scores.shape
    padded = jnp.pad(_without_nan(scores), ((0, 0), (0, -width % size)), constant_values=-jnp.inf)
    is_best = _ranks(jnp.max(padded.reshape(rows, -1, size), axis=2)) < count
    chunk = jnp.arange(is_best.shape[1], dtype=jnp.int32)
    place = jnp.sum(is_best[:, None, :] & (chunk < chunk[:, None]), axis=2, dtype=jnp.int32)
    chosen = _by_place(jnp.broadcast_to(chunk, place.shape), jnp.where(is_best, place, count), count)
    return (chosen[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)).reshape(rows, -1)


def _by_place(values: Int32[Array, "B W"], place: Int32[Array, "B W"], count: int) -> Int32[Array, "B N"]:
    """The values at places 0 to count - 1, each of which one entry of a row has."""
    wanted = place[:, None, :] == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(wanted, values[:, None, :], 0), axis=2, dtype=jnp.int32)


def _ranks(scores: Float32[Array, "B W"]) -> Int32[Array, "B W"]:
    """How many entries of the row stand before each one. One fused reduction: the comparisons are never stored.

    Of an odd number of entries, one more if need be, and apart from what they come from: else XLA may compare tiles so
    large that compiling this one kernel takes a minute.
    """
    width = scores.shape[1]
    scores = jnp.pad(_without_nan(scores), ((0, 0), (0, 1 - width % 2)), constant_values=-jnp.inf)
    scores = lax.optimization_barrier(scores)
    place = jnp.arange(scores.shape[1])
    other, own = scores[:, None, :], scores[:, :, None]
    is_before = (other > own) | ((other == own) & (place < place[:, None]))
    return jnp.sum(is_before, axis=2, dtype=jnp.int32)[:, :width]


def _without_nan(scores: Float32[Array, "B W"]) -> Float32[Array, "B W"]:
    return jnp.where(jnp.isnan(scores), -jnp.inf, scores)
