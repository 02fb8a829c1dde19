"""The few best ids of a row in their order, as one Mosaic GPU kernel.

Order: the higher score first; equal scores by id, the lowest first. A CTA, one warpgroup, has a row, and finds one id
after the other. What is greatest in a chunk bounds what is left of it, so that it reads the chunk with the greatest
bound, and that alone, takes its best id behind the last one found, and lowers the bound to what then is the best.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.row_chunks import MAX, RowChunks, vector

LEAST = -(1 << 31)
"""The order of what is no candidate, below that of -inf."""


def best_ids_mosaic(scores: jax.Array, maxima: jax.Array, count: int) -> jax.Array:
    """i32[B, count], the ids of the `count` best scores, 1 <= count <= V. A NaN counts as -inf.

    scores: [B, V], of any floating type. maxima: f32[B, N], see `best_of_chunks`.
    Raises ImplementationError where Mosaic GPU kernels cannot run.
    """
    rows, num_chunks = maxima.shape
    width = num_chunks + -num_chunks % compat.LANES
    # A chunk with a NaN is read first, and then bounded by the best of its numbers.
    bounds = jnp.where(jnp.isnan(maxima), MAX, order_of(maxima))
    bounds = jnp.pad(bounds, ((0, 0), (0, width - num_chunks)), constant_values=LEAST)
    layout = compat.strided(width)

    def best_ids(scores_ref, bounds_ref, ids_ref):
        row = lax.axis_index("row")
        chunks, number = RowChunks(scores_ref, row), compat.iota(width)

        def of_chunks(value):
            return compat.repeated(jnp.asarray(value, jnp.int32), (width,), layout)

        def one(carry):
            found, bounds, last, last_id = carry
            bound = jnp.max(bounds)
            chunk = jnp.min(jnp.where(bounds == of_chunks(bound), number, of_chunks(MAX)))
            ids, order = chunks.ids(chunk), order_of(chunks.load(chunk).astype(jnp.float32))
            is_behind = (order < vector(last)) | ((order == vector(last)) & (ids > vector(last_id)))
            order = jnp.where(chunks.is_own(chunk, ids) & is_behind, order, vector(LEAST))
            best = jnp.max(order)
            chosen = jnp.min(jnp.where(order == vector(best), ids, vector(MAX)))
            is_found = best == bound
            ids_ref[row, found] = chosen
            taken = ids == vector(jnp.where(is_found, chosen, -1))
            rest = jnp.max(jnp.where(taken, vector(LEAST), order))
            bounds = jnp.where(number == of_chunks(chunk), of_chunks(rest), bounds)
            last, last_id = jnp.where(is_found, best, last), jnp.where(is_found, chosen, last_id)
            return found + is_found.astype(jnp.int32), bounds, last, last_id

        bounds = compat.load(bounds_ref.at[row, compat.ds(0, width)], layout=layout, optimized=False)
        start = jnp.int32(0), bounds, jnp.int32(MAX), jnp.int32(-1)
        lax.while_loop(lambda carry: carry[0] < count, one, start)

    return compat.kernel(
        best_ids,
        out_type=jax.ShapeDtypeStruct((rows, count), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        auto_barriers=False,
    )(scores, bounds)


def order_of(scores: jax.Array) -> jax.Array:
    """i32 that ascend with f32 scores and are equal for equal ones; a NaN's is that of -inf."""
    scores = jnp.where(scores == scores, scores, -jnp.inf)
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return bits ^ ((bits >> 31) & MAX)
