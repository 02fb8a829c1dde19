"""The filters of a draw, one after the other: min_p, top_k, top_p; and the draw from what they leave."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.random import gumbel
from jaxrunner.sampling.temperature import ScaledRows, inverse, is_sound, offset, scale
from jaxrunner.sampling.top_k import limit_of, top_k
from jaxrunner.sampling.top_p import is_on, top_p
from jaxrunner.state.sampling import SamplingState


def chunk_maxima(
    logits: Float32[Array, "B V"], *, op: str = "filters", implementation: Implementation = None
) -> Float32[Array, "B N"] | None:
    """The greatest logit of each chunk of the kernel for this op; None where XLA does it.

    Computed apart: XLA makes of the greatest of these another pass over the row. Raises ImplementationError where a
    named implementation cannot run.
    """
    from jaxrunner.pallas import row_chunks

    against = {"mosaic": row_chunks.reason_against(logits.shape[1])}
    is_kernel = resolve(op, implementation, against) == "mosaic"
    return lax.optimization_barrier(row_chunks.best_of_chunks(logits)) if is_kernel else None


def best_id(logits: Float32[Array, "B V"], maxima: Float32[Array, "B N"] | None) -> Int32[Array, "B"]:
    """argmax of each row, the lowest id on a tie, the first NaN if there is one. With its chunks' maxima only one chunk
    is read."""
    if maxima is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    from jaxrunner.pallas.row_chunks import CHUNK

    ids = jnp.argmax(maxima, axis=-1).astype(jnp.int32)[:, None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    values = jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf)
    return ids[:, 0] + jnp.argmax(values, axis=-1).astype(jnp.int32)


class Left(NamedTuple):
    """What a kernel draws from: see `draw_mosaic`. sound: bool[B], rows that are not damaged."""

    rows: ScaledRows
    best: jax.Array
    magnitude: jax.Array
    end: jax.Array
    sound: jax.Array


def scale_and_filter(
    logits: Float[Array, "B V"], params: SamplingState, maxima: Float32[Array, "B N"] | None
) -> tuple[Float32[Array, "B V"], Left | None]:
    """(`temperature.scale`, then `apply_filters`; the same for a kernel). With its chunks' maxima the kernel filters,
    and the row's greatest is known."""
    if maxima is None:
        return apply_filters(scale(logits.astype(jnp.float32), params.temperature), params), None
    highest = jnp.max(maxima, axis=-1, keepdims=True)
    # What is greatest in a chunk stays it, and becomes the same number.
    scaled, best = (scale(x.astype(jnp.float32), params.temperature, highest) for x in (logits, maxima))
    # The sets have no gradient; the scores that are left do.
    rows = ScaledRows(logits, offset(highest)[:, 0], inverse(params.temperature))
    return _mosaic(scaled, params, *lax.stop_gradient((rows, best)))


def draw(
    scores: Float32[Array, "B V"],
    keys: jax.Array,
    left: Left | None,
    best: Int32[Array, "B"],
    is_greedy: Bool[Array, "B"],
) -> Int32[Array, "B"]:
    """argmax of scores + noise, the lowest id on a tie, the first NaN if there is one; of greedy rows any id.

    left: of `scale_and_filter`; with it a kernel draws, and reads no scores. best: the rows' `best_id`, which is the
    token of damaged ones.
    """
    if left is None:
        # Something between the product in a score and the sum: contracted, they would be rounded once, in some tiers.
        finite = jnp.maximum(scores, jnp.finfo(jnp.float32).min)
        return jnp.argmax(finite + gumbel(keys, scores.shape[1]), axis=-1).astype(jnp.int32)
    from jaxrunner.pallas.draw_mosaic import NOTHING, draw_mosaic

    magnitude = jnp.where(left.sound & ~is_greedy, left.magnitude, NOTHING)
    drawn = draw_mosaic(left.rows, left.best, magnitude, left.end, jax.random.key_data(keys))
    return jnp.where(left.sound & ~is_greedy, drawn, best)


def apply_filters(scaled: Float32[Array, "B V"], params: SamplingState) -> Float32[Array, "B V"]:
    """scaled after min_p, top_k and top_p: -inf where a row's filter drops an id. Damaged rows stay as they are.

    scaled: as `temperature.scale` leaves it. What is left is a prefix of the row, the best ids first and equal ones by
    id.
    """
    sound = is_sound(scaled)
    scaled = min_p(scaled, jnp.where(sound, params.min_p, 0))
    scaled = top_k(scaled, jnp.where(sound, params.top_k, 0))
    return top_p(scaled, jnp.where(sound, params.top_p, 0))


def _mosaic(
    scaled: Float32[Array, "B V"], params: SamplingState, rows: ScaledRows, best: Float32[Array, "B N"]
) -> tuple[Float32[Array, "B V"], Left]:
    """See `apply_filters`. The masses of top_p are computed by the kernel's exp, which may differ in the last bit."""
    from jaxrunner.pallas import filters_mosaic

    vocab_size = scaled.shape[1]
    sound = is_sound(best)
    bound = jnp.where(sound & (params.min_p > 0), -jnp.log(params.min_p), jnp.inf)
    furthest = lax.bitcast_convert_type(jnp.abs(bound), jnp.int32)
    count = limit_of(jnp.where(sound, params.top_k, 0), vocab_size)
    mass = jnp.where(sound & is_on(params.top_p), params.top_p, 1.0)
    magnitude, end = filters_mosaic.filter_ends_mosaic(rows, best, furthest, count, mass)
    own = lax.bitcast_convert_type(jnp.abs(scaled), jnp.int32)
    is_tie = (own == magnitude[:, None]) & (jnp.arange(vocab_size) < end[:, None])
    kept = jnp.where((own < magnitude[:, None]) | is_tie | ~sound[:, None], scaled, -jnp.inf)
    return kept, Left(rows, best, magnitude, end, sound)
