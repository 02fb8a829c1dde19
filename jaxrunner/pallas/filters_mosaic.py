"""min_p, top_k and top_p as one Mosaic GPU kernel: where in each row the ids end that a token may be drawn from.

What the filters leave is a prefix of the row in the order of `sampling.threshold`, so each of them is a search for the
magnitude (scores are not positive) at which a count or a mass is reached. A CTA has a row. Each pass weighs what lies
before N_BOUNDS bounds at once and finds the least and the greatest magnitude of the range that was left, so that a few
passes end at one value; if many ids have it, one more pass counts them. The row does not fit on chip, but few of its
chunks matter: the least magnitude of each is known, and only those are read that reach into the range. With top_k
of 50 these are 50 of 250 from the beginning: the k-th id cannot come after the k-th least of the chunks' magnitudes.
Little more than k ids come before that. They are gathered in one pass and kept on chip, where all others search: a lane
keeps the least it has seen. If a lane had to drop one, the passes go over the chunks. So do the first two without a
small top_k; then the ids inside the range that is left are few enough, as a rule, to be gathered as well.

A CTA is one warpgroup: those of a CTA would share the scratch memory through which JAX sums up a vector.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.pallas import compat
from jaxrunner.pallas.row_chunks import (
    CHUNK,
    INFINITE,
    MAX,
    ScoredChunks,
    chunk_layout,
    count_chunks,
    list_chunks,
    magnitudes,
    spread,
    vector,
)
from jaxrunner.sampling.temperature import ScaledRows
from jaxrunner.sampling.top_p import UNIT_BITS, WORD, mass_exponent, mass_limit, power_of_two, scaled_mass

N_BOUNDS = 8
AT_ONCE = 4
"""Chunks that are visited together, while as many more are on their way from memory; and how many ids a lane keeps."""
MOST_GATHERED = 256
"""Ids of a top_k that are gathered; with more of them lanes would drop some too often."""
MOST_PASSES = 40
WEIGHTLESS = 0x41B00000
"""22.0: an id of exp(-22) times the greatest probability has no mass at any scale, see `mass_exponent`."""


def filter_ends_mosaic(
    scaled: ScaledRows, best: jax.Array, furthest: jax.Array, count: jax.Array, mass: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(magnitude, end), i32[B]: a row's ids are left whose magnitude, the bits of |scaled|, is below `magnitude`, and
    of those that have just this the ones before `end`.

    scaled: no score is positive. best: f32[B, N], scores, see `best_of_chunks`. furthest: i32[B], the greatest
    magnitude that min_p leaves. count: i32[B], how many ids top_k leaves, V where it is off. mass: f32[B], the part of
    the mass that top_p leaves, 1 where it is off.
    Raises ImplementationError where Mosaic GPU kernels cannot run.
    """
    rows, vocab_size = scaled.logits.shape
    num_chunks = count_chunks(vocab_size)
    num_places = num_chunks + -num_chunks % compat.LANES
    nearest = magnitudes(best, num_places)

    def sampling_filter(
        logits_ref,
        offset_ref,
        inverse_ref,
        nearest_ref,
        furthest_ref,
        count_ref,
        mass_ref,
        magnitude_ref,
        end_ref,
        listed,
        magnitude_of,
        bounds_of,
        *gathered_of,
    ):
        row = lax.axis_index("cta")
        chunks = ScoredChunks(logits_ref, row, spread(offset_ref[row]), spread(inverse_ref[row]))
        load, read = chunks.load, chunks.read
        zero = vector(0)

        def list_below(stop):
            """The list becomes the chunks that hold a magnitude below `stop`; returns how many."""
            return list_chunks(listed, magnitude_of, num_places, stop, behind=num_chunks, more=2 * AT_ONCE)

        def over_chunks(length, visit, carry, gathered=False):
            """visit(chunk, logits, carry) over all chunks of the list, in their order, or over what is gathered."""

            def loaded(chunks):
                chunks = [listed[chunk] for chunk in chunks]
                if gathered is False:
                    return [load(chunk) for chunk in chunks]
                return lax.cond(gathered, kept, lambda: [load(chunk) for chunk in chunks])

            def some(i, carry):
                logits, carry = carry
                first = i * AT_ONCE
                # All of them a round ahead: a register that is passed on waits for what is loaded into it.
                following = loaded([first + AT_ONCE + n for n in range(AT_ONCE)])
                for n, each in enumerate(logits):
                    carry = visit(listed[first + n], each, carry)
                return following, carry

            rounds = lax.div(length + AT_ONCE - 1, jnp.int32(AT_ONCE))
            return lax.fori_loop(0, rounds, some, (loaded(range(AT_ONCE)), carry))[1]

        def kept():
            """What is gathered."""
            stored = [compat.load(ref, layout=chunk_layout()) for ref in gathered_of]
            return [lax.bitcast_convert_type(each, jnp.float32).astype(logits_ref.dtype) for each in stored]

        def gather(length, low, high):
            """(whether all ids from `low` to `high` - 1 are gathered, the length of the list, which then are their
            places). high: not above the magnitude of -inf, which stands for none."""

            def visit(chunk, logits, carry):
                bits = read(chunk, logits)[1]
                is_inside = (bits >= vector(low)) & (bits < vector(high))
                here = jnp.where(is_inside, logits.astype(jnp.float32), nothing)
                places = []
                for best in carry:
                    places.append(jnp.maximum(best, here))
                    here = jnp.minimum(best, here)
                return places

            nothing = compat.filled((CHUNK,), -jnp.inf, chunk_layout())
            *best, dropped = over_chunks(length, visit, [nothing] * (AT_ONCE + 1))
            is_whole = jnp.max(dropped) == -jnp.inf
            for ref, logits in zip(gathered_of, best, strict=True):
                ref[...] = lax.bitcast_convert_type(logits, jnp.int32)

            def list_places():
                compat.commit()  # no thread reads the old list any more
                for n in range(2 * AT_ONCE):
                    listed[n] = jnp.int32(n if n < AT_ONCE else num_chunks)
                return jnp.int32(AT_ONCE)

            length = lax.cond(is_whole, list_places, lambda: length)
            compat.commit()
            return is_whole, length

        def survey(length, gathered, weigh, bounds, low, high):
            """(weight below each bound and below high, least and greatest magnitude in low..high - 1)."""
            bounds = [*bounds, high]

            def visit(chunk, logits, carry):
                sums, first, last = carry
                bits = read(chunk, logits)[1]
                weight = weigh(bits)
                sums = tuple(
                    total + jnp.where(bits < vector(bound), weight, zero)
                    for total, bound in zip(sums, bounds, strict=True)
                )
                first = jnp.minimum(first, jnp.where(bits >= vector(low), bits, vector(MAX)))
                return sums, first, jnp.maximum(last, jnp.where(bits < vector(high), bits, zero))

            sums, first, last = over_chunks(length, visit, ((zero,) * len(bounds), vector(MAX), zero), gathered)
            return [jnp.sum(total) for total in sums], jnp.min(first), jnp.max(last)

        def bounds_in(low, high, number):
            """N_BOUNDS magnitudes above low and below high, by equal steps of the score, or of its bits in every second
            pass. low, high: two apart at least."""
            end = jnp.where((high > WEIGHTLESS) & (low < WEIGHTLESS), WEIGHTLESS, jnp.minimum(high, INFINITE - 1))

            def lanes(value):
                return compat.full(compat.LANES, value)

            part = (compat.iota(compat.LANES) + lanes(1)).astype(jnp.float32) / (N_BOUNDS + 1)
            least, most = (lax.bitcast_convert_type(lanes(x), jnp.float32) for x in (low, end))
            by_score = lax.bitcast_convert_type(least + (most - least) * part, jnp.int32)
            by_bits = lanes(low) + (lanes(high - low).astype(jnp.float32) * part).astype(jnp.int32)
            chosen = jnp.where(lanes(lax.rem(number, jnp.int32(2))) == lanes(0), by_score, by_bits)
            compat.commit()  # no thread reads the old bounds any more
            bounds_of[...] = jnp.minimum(jnp.maximum(chosen, lanes(low + 1)), lanes(high - 1))
            compat.commit()
            return [bounds_of[n] for n in range(N_BOUNDS)]

        def narrow(limit, weights, first, last, bounds, low, high, below_low, below_high):
            low, high = jnp.maximum(low, first), jnp.minimum(high, last + 1)
            for bound, weight in zip(bounds, weights[:N_BOUNDS], strict=True):
                is_before = weight < limit
                low = jnp.where(is_before, jnp.maximum(low, bound), low)
                high = jnp.where(is_before, high, jnp.minimum(high, bound))
                below_low = jnp.where(is_before, jnp.maximum(below_low, weight), below_low)
                below_high = jnp.where(is_before, below_high, jnp.minimum(below_high, weight))
            return low, high, below_low, below_high

        def greatest(bits, is_low):
            """The greatest number of the bits from lowest to highest that `is_low`; so are all below it."""
            lowest, highest = bits

            def bit(i, found):
                candidate = found | (jnp.int32(1) << (highest - i))
                return jnp.where(is_low(candidate), candidate, found)

            return lax.fori_loop(0, highest - lowest + 1, bit, jnp.int32(0))

        places = compat.strided(num_places)

        def nearest_chunks():
            return compat.load(nearest_ref.at[row, compat.ds(0, num_places)], layout=places, optimized=False)

        def kth_chunk(limit):
            """At least the limit-th least of the chunks' magnitudes, and less than 2^16 units above it."""
            values = nearest_chunks()

            def lanes(value):
                return compat.repeated(jnp.asarray(value, jnp.int32), (num_places,), places)

            def is_low(value):
                return jnp.sum(jnp.where(values < lanes(value), lanes(1), lanes(0))) < limit

            return greatest((16, 30), is_low) | 0xFFFF

        def ratio_of(bits):
            return jnp.exp(-lax.bitcast_convert_type(bits, jnp.float32))

        def masses(exponent):
            power = power_of_two(vector(exponent))
            return lambda bits: scaled_mass(ratio_of(bits), power)

        def words_of(units):
            return units >> WORD, units & ((1 << WORD) - 1)

        def one_of(weigh, magnitude):
            return jnp.max(weigh(vector(magnitude)))

        def prefix_mass(length, gathered, reach, ties):
            """(scale of masses, how many ids at `reach` count) of what is before it and the first `ties` of them."""
            strict = jnp.minimum(reach, WEIGHTLESS + 1)
            in_units = masses(UNIT_BITS)

            def visit(chunk, logits, carry):
                high, low, equal = carry
                bits = read(chunk, logits)[1]
                here = words_of(jnp.where(bits < vector(strict), in_units(bits), zero))
                return high + here[0], low + here[1], equal + jnp.where(bits == vector(reach), vector(1), zero)

            sums = over_chunks(length, visit, (zero, zero, zero), gathered)
            high, low, equal = (jnp.sum(x) for x in sums)
            equal = jnp.where(reach < WEIGHTLESS, jnp.minimum(equal, ties), 0)
            here = words_of(one_of(in_units, reach))
            return mass_exponent(high + equal * here[0], low + equal * here[1], vocab_size), equal

        def shorten(stage, prefix):
            """The prefix that top_k (stage 0) or top_p (stage 1) leaves. (reach, ties, every): all ids before the
            magnitude `reach` and the first `ties` of those that have it, of `every` or, if MAX, of nobody knows how
            many. gathered: whether all of these are on chip."""
            reach, ties, _, gathered = prefix
            counts = stage == 0
            limit = count_ref[row]
            top = lax.cond(
                counts,
                lambda: jnp.where(limit <= num_chunks, kth_chunk(limit), INFINITE) + 1,
                lambda: jnp.minimum(reach, WEIGHTLESS + 1),
            )
            # One more, for those at `reach` itself.
            stop = jnp.where(counts, top, jnp.minimum(top, INFINITE) + 1)
            length = lax.cond(gathered, lambda: jnp.int32(AT_ONCE), lambda: list_below(stop))
            few = counts & (limit <= min(MOST_GATHERED, num_chunks))
            exponent, equal = lax.cond(
                counts, lambda: (jnp.int32(0), jnp.int32(0)), lambda: prefix_mass(length, gathered, reach, ties)
            )
            weigh_mass = masses(exponent)

            def weigh(bits):
                return lax.cond(counts, lambda: vector(1), lambda: weigh_mass(bits))

            def one(carry):
                number, low, high, below_low, below_high, limit, since, before, length = carry
                # Of those gathered before, all lie from `since` on, and weigh `before` less than with all below it.
                tries = (since < 0) & (few | (number >= 2)) & (high <= INFINITE) & (length > AT_ONCE)
                is_new, length = lax.cond(tries, lambda: gather(length, low, high), lambda: (jnp.bool_(False), length))
                since, before = jnp.where(is_new, low, since), jnp.where(is_new, below_low, before)
                bounds = bounds_in(low, high, number)
                weights, first, last = survey(length, since >= 0, weigh, bounds, low, high)
                weights = [before + weight for weight in weights]
                # The first pass also weighs the whole prefix, of which top_p wants a part.
                total = weights[-1] + equal * one_of(weigh, reach)
                part = mass_limit(mass_ref[row], total)
                limit = jnp.where((number == 0) & ~counts, part, limit)
                below_high = jnp.where(number == 0, weights[-1], below_high)
                found = narrow(limit, weights, first, last, bounds, low, high, below_low, below_high)
                return (number + 1, *found, limit, since, before, length)

            def go_on(carry):
                number, low, high, _, below_high, limit, *_ = carry
                return (number == 0) | ((high - low > 1) & (below_high >= limit) & (number < MOST_PASSES))

            none = jnp.int32(0)
            start = (none, none, top, none, jnp.int32(MAX), limit, jnp.where(gathered, 0, -1), none, length)
            _, low, _, below_low, below_high, limit, since, *_ = lax.while_loop(go_on, one, start)
            is_inside = below_high >= limit
            magnitude, before = jnp.where(is_inside, low, reach), jnp.where(is_inside, below_low, below_high)
            each = jnp.maximum(one_of(weigh, magnitude), 1)
            number = lax.div(limit - before + each - 1, each)
            every = jnp.where(is_inside, lax.div(below_high - before, each), MAX)
            return magnitude, jnp.where(is_inside, number, jnp.minimum(equal, number)), every, since == 0

        def nth_tie(magnitude, wanted):
            """The id after the `wanted`-th one that has this magnitude."""

            def is_tie(bits):
                return jnp.where(bits == vector(magnitude), vector(1), zero)

            def visit(chunk, logits, carry):
                before, chosen, left = carry
                after = before + jnp.sum(is_tie(read(chunk, logits)[1]))
                is_here = (before < wanted) & (after >= wanted)
                return after, jnp.where(is_here, chunk, chosen), jnp.where(is_here, wanted - before, left)

            _, chunk, left = over_chunks(list_below(magnitude + 1), visit, (jnp.int32(0),) * 3)
            ids, bits = read(chunk, load(chunk))
            ties = is_tie(bits)

            def is_low(place):
                return jnp.sum(jnp.where(ids < vector(chunk * CHUNK + place), ties, zero)) < left

            return chunk * CHUNK + greatest((0, CHUNK.bit_length() - 1), is_low) + 1

        def filtered():
            def stage(number, prefix):
                reach, ties, every, gathered = prefix
                far = furthest_ref[row]
                is_nearer = (far < reach) & (number == 1)
                reach = jnp.where(is_nearer, far, reach)
                prefix = reach, jnp.where(is_nearer, MAX, ties), jnp.where(is_nearer, MAX, every), gathered
                is_on = jnp.where(number == 0, count_ref[row] < vocab_size, mass_ref[row] < 1.0)
                return lax.cond(is_on, lambda: shorten(number, prefix), lambda: prefix)

            everything = (jnp.int32(INFINITE + 1), jnp.int32(0), jnp.int32(MAX), jnp.bool_(False))
            reach, ties, every, _ = lax.fori_loop(0, 2, stage, everything)
            end = lax.cond(ties < every, lambda: nth_tie(reach, ties), lambda: jnp.int32(vocab_size))
            return reach, end

        magnitude_of[...] = nearest_chunks()
        compat.commit()
        is_on = (count_ref[row] < vocab_size) | (furthest_ref[row] < INFINITE) | (mass_ref[row] < 1.0)
        magnitude, end = lax.cond(is_on, filtered, lambda: (jnp.int32(MAX), jnp.int32(0)))

        magnitude_ref[row] = magnitude
        end_ref[row] = end

    scratch: list[Any] = [compat.words((n,)) for n in (num_places + 2 * AT_ONCE, num_places, compat.LANES)]
    scratch += [compat.words((CHUNK,))] * AT_ONCE
    magnitude, end = compat.kernel(
        sampling_filter,
        out_type=[jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2,
        grid=(rows,),
        grid_names=("cta",),
        scratch_types=scratch,
        auto_barriers=False,
    )(*scaled, nearest, furthest, count, mass)
    return magnitude, end
