"""The draw from what the filters left, as a Mosaic GPU kernel: argmax of score + Gumbel noise.

Noise costs a hundred instructions an id, and the filters leave few ids. So these are gathered first: of the chunks that
hold any, by their greatest scores, each lane keeps the few that it meets, and noise is drawn for these alone. Where a
lane meets too many, or the row filters nothing, it is drawn for the whole chunks. An id whose score is so low that no
noise could make it the greatest counts as dropped.

A CTA, one warpgroup, has a part of a row, so that few rows occupy the GPU too; XLA takes the best of the parts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.row_chunks import (
    CHUNK,
    INFINITE,
    MAX,
    NOTED_AT_ONCE,
    ScoredChunks,
    chunk_layout,
    count_chunks,
    list_chunks,
    magnitudes,
    spread,
    vector,
)
from jaxrunner.sampling.random import gumbel_of
from jaxrunner.sampling.temperature import ScaledRows

KEPT = 4
"""Ids that a lane keeps. With 200 ids in a part, one part in 30 has a lane that meets more."""
AT_ONCE = 4
"""Chunks that are gathered together, while as many more are on their way from memory."""
ENOUGH_CTAS = 1024
HOPELESS = 0x41A40000
"""20.5: noise is between -4.48 and 15.95, and the best score is 0."""
NOTHING = -1
"""A `magnitude` of rows for which no token is drawn."""


def draw_mosaic(
    scaled: ScaledRows, best: jax.Array, magnitude: jax.Array, end: jax.Array, words: jax.Array
) -> jax.Array:
    """i32[B], the id with the greatest score + noise (`random.gumbel_of`), the lowest on a tie; of rows with nothing
    left, any i32.

    scaled: no score is positive, the greatest of a row is 0. best: f32[B, N], scores, see `best_of_chunks`. magnitude,
    end: i32[B], which ids are left, see `filter_ends_mosaic`; NOTHING for rows that draw nothing. words: u32[B, 2], of
    the rows' keys.
    Raises ImplementationError where Mosaic GPU kernels cannot run.
    """
    rows, vocab_size = scaled.logits.shape
    num_chunks = count_chunks(vocab_size)
    parts, places = split(rows, num_chunks)
    nearest = magnitudes(best, (parts - 1) * places + compat.LANES)

    def sampling_draw(
        logits_ref,
        offset_ref,
        inverse_ref,
        nearest_ref,
        magnitude_ref,
        end_ref,
        words_ref,
        greatest_ref,
        id_ref,
        listed,
        magnitude_of,
        kept_logits,
        kept_ids,
    ):
        row, part = lax.axis_index("row"), lax.axis_index("part")
        chunks = ScoredChunks(logits_ref, row, spread(offset_ref[row]), spread(inverse_ref[row]))
        zero, one = vector(0), vector(1)
        reach, end = jnp.minimum(magnitude_ref[row], HOPELESS), end_ref[row]

        def slot(number):
            return compat.ds(number * CHUNK, CHUNK)

        def is_left(ids, bits):
            return (bits < vector(reach)) | ((bits == vector(reach)) & (ids < vector(end)))

        def gather(length):
            """Keeps what is left of all listed chunks; returns the most that a lane met."""

            def loaded(first):
                return [chunks.load(listed[first + n]) for n in range(AT_ONCE)]

            def some(i, carry):
                logits, number, logits_of, ids_of = carry
                following = loaded((i + 1) * AT_ONCE)
                for n, each in enumerate(logits):
                    ids, bits = chunks.read(listed[i * AT_ONCE + n], each)
                    left = is_left(ids, bits)
                    here = [left & (number == vector(n)) for n in range(KEPT)]
                    wide = each.astype(jnp.float32)
                    logits_of = tuple(jnp.where(h, wide, old) for h, old in zip(here, logits_of, strict=True))
                    ids_of = tuple(jnp.where(h, ids, old) for h, old in zip(here, ids_of, strict=True))
                    number = number + jnp.where(left, one, zero)
                return following, number, logits_of, ids_of

            start = loaded(0), zero, (lowest,) * KEPT, (zero,) * KEPT
            rounds = lax.div(length + AT_ONCE - 1, jnp.int32(AT_ONCE))
            _, number, logits_of, ids_of = lax.fori_loop(0, rounds, some, start)
            for n in range(KEPT):
                kept_logits[slot(n)] = lax.bitcast_convert_type(logits_of[n], jnp.int32)
                kept_ids[slot(n)] = ids_of[n]
            compat.commit()
            return jnp.max(number)

        def draw(length, most):
            """(greatest score + noise of each lane, its id) over what is kept or, if that is not all, over the list."""
            is_kept = most <= KEPT

            def from_kept(ref, i):
                return compat.load(ref.at[slot(jnp.minimum(i, KEPT - 1))], layout=chunk_layout())

            def logits_at(i):
                def gathered():
                    wide = lax.bitcast_convert_type(from_kept(kept_logits, i), jnp.float32)
                    return wide.astype(logits_ref.dtype)

                return lax.cond(is_kept, gathered, lambda: chunks.load(listed[i]))

            def ids_at(i):
                return lax.cond(is_kept, lambda: from_kept(kept_ids, i), lambda: chunks.ids(listed[i]))

            def visit(i, carry):
                logits, greatest, chosen = carry
                following = logits_at(i + 1)
                ids, bits = ids_at(i), chunks.magnitudes(logits)
                own = chunks.is_own(jnp.where(is_kept, 0, listed[i]), ids)
                noise = gumbel_of(key, lax.bitcast_convert_type(ids, jnp.uint32))
                # Nothing that is left is hopeless. Without it, the product in a score and this sum might be contracted.
                size = lax.bitcast_convert_type(jnp.minimum(bits, vector(HOPELESS)), jnp.float32)
                total = jnp.where(own & is_left(ids, bits), noise - size, lowest)
                # A lane meets its ids in ascending order.
                is_better = total > greatest
                return following, jnp.where(is_better, total, greatest), jnp.where(is_better, ids, chosen)

            rounds = jnp.where(is_kept, most, length)
            return lax.fori_loop(0, rounds, visit, (logits_at(jnp.int32(0)), lowest, vector(MAX)))[1:]

        key = spread(words_ref[row, 0]), spread(words_ref[row, 1])
        lowest = compat.filled((CHUNK,), -jnp.inf, chunk_layout())
        first = part * places
        magnitude_of[...] = compat.load(
            nearest_ref.at[row, compat.ds(first, compat.LANES)], layout=compat.strided(compat.LANES), optimized=False
        )
        compat.commit()
        length = list_chunks(listed, magnitude_of, places, reach + 1, first=first, behind=num_chunks, more=2 * AT_ONCE)
        is_filtered = magnitude_ref[row] <= INFINITE
        most = lax.cond(is_filtered, lambda: gather(length), lambda: jnp.int32(KEPT + 1))
        greatest, chosen = draw(length, most)
        highest = jnp.max(greatest)
        is_highest = greatest == spread(highest)
        greatest_ref[row, part] = highest
        id_ref[row, part] = jnp.min(jnp.where(is_highest, chosen, vector(MAX)))

    greatest, ids = compat.kernel(
        sampling_draw,
        out_type=[jax.ShapeDtypeStruct((rows, parts), dtype) for dtype in (jnp.float32, jnp.int32)],
        grid=(rows, parts),
        grid_names=("row", "part"),
        scratch_types=[
            compat.words((places + 2 * AT_ONCE,)),
            compat.words((compat.LANES,)),
            compat.words((KEPT * CHUNK,)),
            compat.words((KEPT * CHUNK,)),
        ],
        auto_barriers=False,
    )(*scaled, nearest, magnitude, end, words)
    first_best = jnp.argmax(greatest, axis=1)
    return jnp.take_along_axis(ids, first_best[:, None], axis=1)[:, 0]


def split(rows: int, num_chunks: int) -> tuple[int, int]:
    """(parts of a row, chunks of a part: a multiple of NOTED_AT_ONCE, as many as a warpgroup has lanes at most)."""
    wanted = -(-num_chunks * rows // ENOUGH_CTAS)
    places = min(max(wanted + -wanted % NOTED_AT_ONCE, NOTED_AT_ONCE), compat.LANES)
    return -(-num_chunks // places), places
