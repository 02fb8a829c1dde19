"""`best_ids`: the kernel finds what a stable sort finds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.pallas import compat
from jaxrunner.pallas.row_chunks import CHUNK
from jaxrunner.sampling.best_ids import best_ids
from jaxrunner.sampling.filters import chunk_maxima
from jaxrunner.sampling.logprobs import token_logprobs
from tests.pallas.test_filters import needs_mosaic
from tests.sampling.test_best_ids import VALUES, by_sorting


@functools.partial(jax.jit, static_argnums=1)
def by_kernel(scores, count):
    maxima = chunk_maxima(scores.astype(jnp.float32), op="best_ids", implementation="mosaic")
    return best_ids(scores, count, maxima)


def maxima_of(scores):
    """As a GPU finds them: on a CPU, XLA's greatest of numbers with a NaN may be anything."""
    padded = np.pad(scores, ((0, 0), (0, -scores.shape[1] % CHUNK)), constant_values=-np.inf)
    return padded.reshape(len(scores), -1, CHUNK).max(axis=2)


def scores_of(vocab, seed=0):
    """Numbers without and with ties; few that are not NaN; nothing but -inf; the best in one chunk, or at its ends."""
    rng = np.random.default_rng(seed)
    scores = np.full((7, vocab), -np.inf, np.float32)
    scores[0] = rng.normal(size=vocab)
    scores[1] = rng.choice(VALUES, vocab)
    scores[2] = rng.choice([np.nan, -np.inf, 1.0], vocab, p=[0.9, 0.098, 0.002])
    scores[3, rng.integers(0, vocab, 5)] = np.nan
    scores[4] = rng.normal(size=vocab) + 50 * (np.arange(vocab) // CHUNK == 1)
    scores[5, [0, CHUNK - 1, -1]] = 1, 2, 2
    return scores


def check(scores, count):
    np.testing.assert_array_equal(by_kernel(jnp.asarray(scores), count), by_sorting(scores, count))


@needs_mosaic
@pytest.mark.parametrize(("vocab", "count"), [(2 * CHUNK + 260, 20), (CHUNK, 1)])
def test_interpreted(vocab, count):
    scores = scores_of(vocab)
    with compat.interpreting():
        found = jax.jit(best_ids, static_argnums=1)(jnp.asarray(scores), count, jnp.asarray(maxima_of(scores)))
        np.testing.assert_array_equal(found, by_sorting(scores, count))


@needs_mosaic
def test_logprobs_by_the_kernel_are_those_of_xla_in_the_interpreter():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2 * CHUNK)), jnp.bfloat16)
    chosen, listed = jnp.array([0, 600, 1023]), jnp.array([[1, 0], [5, 6], [0, 0]])
    with compat.interpreting():
        found = token_logprobs(logits, chosen, listed, implementation="mosaic")
        wanted = token_logprobs(logits, chosen, listed, implementation="xla")
        for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(own, other)


@needs_mosaic
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 512), (256, 128_256), (16, 151_936)])
def test_lowers_to_one_kernel(rows, vocab, dtype):
    scores = jax.ShapeDtypeStruct((rows, vocab), dtype)
    assert compat.lower_for_cuda(lambda x: by_kernel(x, 20), scores).as_text().count(f"@{compat.CUSTOM_CALL}") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 20, 128])
@pytest.mark.parametrize("vocab", [512, 1284, 49_152, 128_256, 151_936])
def test_mosaic_on_the_gpu(vocab, count):
    check(scores_of(vocab, seed=vocab), count)


@pytest.mark.gpu
def test_mosaic_on_the_gpu_for_more_rows_than_run_at_once():
    rng = np.random.default_rng(2)
    check(np.float32(np.round(rng.normal(size=(1000, 32_000)) * 8) / 8), 20)
