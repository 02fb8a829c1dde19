"""`commit_rows`: every implementation against a loop in NumPy, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.pallas import compat
from jaxrunner.pallas.commit import commit_rows
from jaxrunner.state.fields import LAST_SAMPLED, NUM_COMPUTED, REQUEST_FIELDS, TOTAL_LEN

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
SHAPES = [(1, 4, 1), (5, 9, 1), (6, 8, 4)]
"""(requests of the batch, rows of the state, sampled ids of a request)."""
MAX_LEN = 40


def build(batch: int, num_rows: int, most: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Every request at another stage: padding with junk, nothing sampled, some or all ids, a history that is full."""
    rng = np.random.default_rng(seed)
    counters = rng.integers(0, MAX_LEN - most, (num_rows, len(REQUEST_FIELDS))).astype(np.int32)
    token_ids = rng.integers(0, 1000, (num_rows, MAX_LEN)).astype(np.int32)
    rows = (1 + rng.permutation(num_rows - 1)[:batch]).astype(np.int32)
    rows[rng.random(batch) < 0.25] = 0
    counters[rows[-1], TOTAL_LEN] = MAX_LEN - most + 1 - rng.integers(0, 2)
    num_sampled = rng.integers(0, most + 1, batch).astype(np.int32)
    num_sampled[-1] = most
    sampled = rng.integers(0, 1000, (batch, most)).astype(np.int32)
    return counters, token_ids, rows, rng.integers(0, 5, batch).astype(np.int32), sampled, num_sampled


def expected(counters, token_ids, rows, num_computed, sampled, num_sampled):
    counters, token_ids = counters.copy(), token_ids.copy()
    for row, computed, ids, count in zip(rows, num_computed, sampled, num_sampled, strict=True):
        if row == 0:
            continue
        for i, token in enumerate(ids[:count]):
            if counters[row, TOTAL_LEN] + i < MAX_LEN:
                token_ids[row, counters[row, TOTAL_LEN] + i] = token
        counters[row, NUM_COMPUTED] += computed
        counters[row, TOTAL_LEN] += count
        if count:
            counters[row, LAST_SAMPLED] = ids[count - 1]
    return counters, token_ids


def check(implementation: str, shape: tuple[int, int, int], seed: int) -> None:
    arrays = build(*shape, seed)
    result = jax.jit(functools.partial(commit_rows, implementation=implementation))(*map(jnp.asarray, arrays))
    for got, want in zip(jax.block_until_ready(result), expected(*arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(got), want, strict=True)


@pytest.mark.parametrize("shape", [*SHAPES, (300, 400, 2)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_xla(shape, seed):
    check("xla", shape, seed)


@needs_mosaic
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mosaic_interpreted(shape):
    with compat.interpreting():
        check("mosaic", shape, 1)


@needs_mosaic
@pytest.mark.parametrize(("batch", "most"), [(1, 1), (256, 1), (1024, 5)])
def test_mosaic_lowers_to_one_kernel_in_place(batch, most):
    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    state = i32(batch + 1, len(REQUEST_FIELDS)), i32(batch + 1, 8192)
    f = functools.partial(commit_rows, implementation="mosaic")
    text = compat.lower_for_cuda(f, *state, i32(batch), i32(batch), i32(batch, most), i32(batch)).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert text.count("output_operand_alias<") == 2
    assert "scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (256, 300, 1), (1000, 1025, 5)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_mosaic_on_the_gpu(shape, seed):
    check("mosaic", shape, seed)
