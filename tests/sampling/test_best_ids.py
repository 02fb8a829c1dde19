"""The best ids without a sort: the same as a stable sort gives, whatever the ties, widths and damaged values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.sampling.best_ids import CHUNKS, best_ids

run = jax.jit(best_ids, static_argnums=1)
SHAPES = ((3, 1), (85, 20), (700, 20), (11_000, 20), (5000, 1))
VALUES = np.array([-np.inf, -3.5, -0.0, 0.0, 1.0, 1.0000001, 7.0, np.inf, np.nan], np.float32)


def by_sorting(scores: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-np.where(np.isnan(scores), -np.inf, scores), axis=1, kind="stable")[:, :count]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.lists(st.sampled_from(range(9)), min_size=1), st.booleans()
)
def test_equal_to_a_stable_sort(shape, seed, palette, is_random):
    """Rows of a few values, full of ties; or of many; with what a filter or a damaged model leaves."""
    rng, (vocab_size, count) = np.random.default_rng(seed), shape
    scores = rng.choice(VALUES[palette], (3, vocab_size))
    if is_random:
        scores = np.where(rng.random(scores.shape) < 0.5, scores, rng.normal(size=scores.shape)).astype(np.float32)
    np.testing.assert_array_equal(run(jnp.asarray(scores), count), by_sorting(scores, count))


@pytest.mark.parametrize("width", [20 * size + 1 for size in CHUNKS])
def test_the_best_at_the_ends_of_chunks_and_of_the_row(width):
    scores = np.full((2, width), -np.inf, np.float32)
    scores[0, [0, 3, 4, 31, 32, -1]] = 1, 2, 2, 3, 3, 9
    scores[1, -20:] = np.arange(20)
    np.testing.assert_array_equal(run(jnp.asarray(scores), 20), by_sorting(scores, 20))


def test_no_operation_sorts_the_vocabulary():
    lowered = run.lower(jax.ShapeDtypeStruct((4, 20_000), jnp.float32), 20).as_text()
    assert "stablehlo.sort" not in lowered
    assert "top_k" not in lowered
