"""`filters.draw`: the kernel takes the token that argmax of the scores + noise takes, from the same scores."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrunner import SamplingParams
from jaxrunner.pallas import compat
from jaxrunner.pallas.draw_mosaic import HOPELESS, split
from jaxrunner.pallas.row_chunks import CHUNK, chunk_layout
from jaxrunner.sampling.filters import best_id, chunk_maxima, draw, scale_and_filter
from jaxrunner.sampling.random import gumbel, gumbel_from, row_keys
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.sampling.temperature import GREEDY_BELOW
from tests.pallas.test_filters import ASKED, logits_of, needs_mosaic
from tests.sampling.rows import sampling_state

WIDE = 12 * CHUNK + 132
"""Two parts, of 8 chunks and of 5, the last of which overlaps the one before it."""
FEW = ({"top_k": 50}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05}, {"top_k": 1}, {})


def state_of(asked):
    return sampling_state([SamplingParams(**({"temperature": 0.8, "seed": i} | each)) for i, each in enumerate(asked)])


@jax.jit
def both(logits, state):
    """(the kernel's tokens, argmax's over the same scores)."""
    maxima, keys = chunk_maxima(logits, implementation="mosaic"), row_keys(state.seed, jnp.arange(len(logits)))
    scores, left = scale_and_filter(logits, state, maxima)
    best, is_greedy = best_id(logits, maxima), state.temperature < GREEDY_BELOW
    return draw(scores, keys, left, best, is_greedy), draw(scores, keys, None, best, is_greedy)


def check(logits, asked):
    found, wanted = both(jnp.asarray(logits), state_of(asked))
    is_random = [each.get("temperature", 0.8) > 0 for each in asked]
    np.testing.assert_array_equal(np.asarray(found)[is_random], np.asarray(wanted)[is_random])
    return np.asarray(found)


def test_rows_are_split_into_parts_that_cover_them():
    for rows in (1, 7, 64, 256, 5000):
        for num_chunks in (1, 8, 9, 96, 251, 1024):
            parts, places = split(rows, num_chunks)
            assert places % 8 == 0
            assert places <= compat.LANES
            assert (parts - 1) * places < num_chunks <= parts * places


def test_what_is_hopeless_cannot_be_drawn():
    noise = np.asarray(gumbel_from(jnp.array([0, 2**32 - 1], jnp.uint32)))
    assert np.uint32(HOPELESS).view(np.float32) > noise[1] - noise[0]


@needs_mosaic
@pytest.mark.parametrize("kind", ["ties", "forbidden"])
def test_interpreted(kind):
    with compat.interpreting():
        check(logits_of(kind, len(FEW), WIDE), FEW)


@needs_mosaic
def test_a_lane_with_more_ids_than_it_keeps_interpreted():
    logits = np.full((3, 20 * CHUNK), -5, np.float32)
    logits[:, 5 : 6 * CHUNK : CHUNK] = 4  # six of one lane in a part of eight chunks
    logits[1, [5, CHUNK + 5]] = -5
    with compat.interpreting():
        found = check(logits, [{"top_k": 6}, {"top_k": 4}, {"top_k": 6, "temperature": 100.0}])
    assert (found % CHUNK == 5).all()


@needs_mosaic
def test_equal_sums_take_the_lowest_id_interpreted():
    """Nothing is left but two ids whose noise is the same number; in one row both are in one part, in another not."""
    rows = 8
    state = state_of([{}] * rows)
    noise = np.asarray(gumbel(row_keys(state.seed, jnp.arange(rows)), WIDE))
    logits, lower, apart = np.full(noise.shape, -np.inf, np.float32), [], set()
    for row in range(rows):
        order = np.argsort(noise[row], kind="stable")
        equal = np.flatnonzero(np.diff(noise[row][order]) == 0)
        pair = order[equal[0] : equal[0] + 2] if len(equal) else order[:1]
        logits[row, pair] = 0
        lower.append(int(pair[0]))
        apart.add(bool(np.diff(pair // (8 * CHUNK)).any()))
    assert apart == {False, True}, "choose other seeds for this test"
    with compat.interpreting():
        assert check(logits, [{}] * rows).tolist() == lower


@needs_mosaic
def test_greedy_and_damaged_rows_take_their_best_id_interpreted():
    logits = logits_of("normal", 4, CHUNK)
    logits[0, 7], logits[1, 8], logits[2] = np.nan, np.inf, -np.inf
    asked = [{"top_k": 3}, {"top_p": 0.5}, {}, {"temperature": 0.0, "top_k": 3}]
    with compat.interpreting():
        assert check(logits, asked).tolist() == [7, 8, 0, int(logits[3].argmax())]


@needs_mosaic
@pytest.mark.parametrize(("rows", "vocab"), [(1, 512), (256, 128_256), (16, 151_936)])
def test_lowers_to_two_kernels(rows, vocab):
    """One that filters, one that draws."""
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), state_of([{}]))
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    sampled = functools.partial(sample_tokens, tier="filtered", implementation="mosaic")
    position = jax.ShapeDtypeStruct((rows,), jnp.int32)
    lowered = compat.lower_for_cuda(lambda *args: sampled(*args).token_ids, logits, state, position)
    assert lowered.as_text().count(f"@{compat.CUSTOM_CALL}") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "forbidden", "flat", "wide", "one lane"])
@pytest.mark.parametrize("vocab", [512, 1284, 49_152, 128_256, 151_936])
def test_mosaic_on_the_gpu(kind, vocab):
    asked = [each for each in (*ASKED, {"top_k": 256}, {"temperature": 50.0}) for _ in range(3)]
    check(logits_of(kind, len(asked), vocab, seed=vocab), asked)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 600])
def test_mosaic_on_the_gpu_however_rows_are_split(rows):
    check(logits_of("normal", rows, 128_256), [ASKED[i % len(ASKED)] for i in range(rows)])


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_tier_on_the_gpu():
    """Rows without filters: drawn by XLA in one tier, by the kernel in the other."""
    logits, state, position = jnp.asarray(logits_of("normal", 256, 128_256)), state_of([{}] * 256), jnp.arange(256)
    tokens = {
        tier: jax.jit(functools.partial(sample_tokens, tier=tier))(logits, state, position).token_ids
        for tier in ("random", "filtered")
    }
    np.testing.assert_array_equal(tokens["random"], tokens["filtered"])


def gumbel_by_mosaic(bits):
    """f32[N, CHUNK] of u32[N, CHUNK]."""

    def gumbel(bits_ref, noise_ref):
        row = lax.axis_index("row")
        bits = compat.load(bits_ref.at[row, compat.ds(0, CHUNK)], layout=chunk_layout(), optimized=False)
        noise_ref[row] = gumbel_from(bits)

    out_type = jax.ShapeDtypeStruct(bits.shape, jnp.float32)
    return compat.kernel(gumbel, out_type=out_type, grid=(len(bits),), grid_names=("row",))(bits)


@needs_mosaic
def test_the_noise_kernel_interpreted():
    bits = jnp.arange(CHUNK, dtype=jnp.uint32)[None] << 23
    with compat.interpreting():
        np.testing.assert_array_equal(gumbel_by_mosaic(bits), gumbel_from(bits))


@pytest.mark.gpu
def test_every_gumbel_number_on_the_gpu_is_that_of_jax():
    """All 2^23 of them: Mosaic's, XLA's, and those that the argmax of `jax.random.gumbel` is made of."""
    bits = (jnp.arange(2**23, dtype=jnp.uint32) << 9).reshape(-1, CHUNK)

    def as_jax(bits):
        tiny = jnp.finfo(jnp.float32).tiny
        uniform = lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32) - 1.0
        return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform * (1.0 - tiny) + tiny)))

    numbers = [np.asarray(jax.jit(f)(bits)).view(np.int32) for f in (gumbel_by_mosaic, gumbel_from, as_jax)]
    np.testing.assert_array_equal(numbers[0], numbers[1])
    np.testing.assert_array_equal(numbers[0], numbers[2])
