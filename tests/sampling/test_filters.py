"""Filters against sorts in NumPy: exact sets, one rule for ties at every batch size, and rows that are no numbers."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrunner import SamplingParams
from jaxrunner.sampling.filters import apply_filters
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.temperature import scale
from jaxrunner.sampling.threshold import first_past
from jaxrunner.sampling.top_k import top_k
from jaxrunner.sampling.top_p import integer_masses, top_p
from tests.sampling.rows import compiled, sampling_state

ROWS, VOCAB = 4, 13
few = settings(max_examples=80, deadline=None)
run = {tier: compiled(tier) for tier in ("greedy", "random", "filtered")}
ops = {
    op.__name__: jax.jit(lambda logits, x, op=op: op(scale(logits, jnp.ones(len(logits))), x))
    for op in (min_p, top_k, top_p)
}
filtered = jax.jit(lambda logits, params: apply_filters(scale(logits, params.temperature), params))


def kept(name, logits, values) -> list[list[int]]:
    """Ids that an op leaves, of each row."""
    dtype = jnp.int32 if name == "top_k" else jnp.float32
    logits = jnp.asarray(logits, jnp.float32)
    out = np.asarray(ops[name](logits, jnp.broadcast_to(jnp.asarray(values, dtype), len(logits))))
    return [np.flatnonzero(row > -np.inf).tolist() for row in out]


def kept_by_all(logits, params) -> list[list[int]]:
    out = np.asarray(filtered(jnp.asarray(logits, jnp.float32), sampling_state(params)))
    return [np.flatnonzero(row > -np.inf).tolist() for row in out]


def draw(logits, params, positions=None, tier="filtered"):
    positions = np.arange(len(logits)) if positions is None else positions
    return np.asarray(run[tier](jnp.asarray(logits, jnp.float32), sampling_state(params), jnp.asarray(positions)))


def descending(row) -> np.ndarray:
    """Ids, the best first; equal ones by id."""
    return np.lexsort((np.arange(len(row)), -np.asarray(row, np.float64)))


def probabilities(row) -> np.ndarray:
    row = np.asarray(row, np.float64)
    weights = np.exp(row - row.max())
    return weights / weights.sum()


# Few values, so that most examples have ties; -inf is a masked id.
scores = st.sampled_from([-np.inf, -30.0, -2.0, -1.5, 0.0, -0.0, 1.0, 1.0000001, 2.5, 40.0, 3e38])
matrices = st.lists(st.lists(scores, min_size=VOCAB, max_size=VOCAB), min_size=ROWS, max_size=ROWS)


def per_row(values):
    return st.lists(values, min_size=ROWS, max_size=ROWS)


@few
@given(matrices, per_row(st.sampled_from([-1, 0, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 2**31 - 1])))
def test_top_k_is_the_head_of_a_stable_sort(logits, k):
    for row, count, ids in zip(np.float32(logits), k, kept("top_k", logits, k), strict=True):
        alive = np.flatnonzero(row > -np.inf)
        # Scores are compared after the maximum was subtracted: what float32 rounds together there is a tie.
        shifted = row - row[alive].max() if len(alive) else row
        head = descending(shifted)[: count if 0 < count < VOCAB else VOCAB]
        assert ids == sorted(set(head) & set(np.flatnonzero(shifted > -np.inf)))


@few
@given(matrices, per_row(st.floats(0.001, 1.0)))
def test_top_p_is_the_head_of_a_stable_sort(logits, p):
    for row, mass, ids in zip(np.float32(logits), p, kept("top_p", logits, p), strict=True):
        if not np.isfinite(row).any():
            continue
        order = descending(row - row.max())
        weights = probabilities(np.float32(row - row.max()))[order]
        before = np.cumsum(weights) - weights
        sure_in, sure_out = order[before < mass - 1e-6], order[before > mass + 1e-6]
        assert set(sure_in[weights[before < mass - 1e-6] > 1e-12]) <= set(ids)
        assert mass == 1 or not set(sure_out) & set(ids)
        assert ids == sorted(set(order[: len(ids)])), "the ids that are kept must be the best ones"


@few
@given(matrices, per_row(st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.5, 0.999, 1.0])))
def test_min_p_is_a_bound_relative_to_the_best(logits, fraction):
    for row, bound, ids in zip(np.float32(logits), fraction, kept("min_p", logits, fraction), strict=True):
        if not np.isfinite(row).any():
            continue
        ratio = np.exp(np.float64(row) - row.max())
        assert set(np.flatnonzero(ratio > bound * (1 + 1e-5))) <= set(ids)
        assert bound == 0 or not set(np.flatnonzero(ratio < bound * (1 - 1e-5))) & set(ids)


@few
@given(
    matrices,
    per_row(st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1e-6, 1e-5, 0.3, 1.0, 50.0]),
        top_k=st.sampled_from([0, 1, 3, 2**30]),
        top_p=st.sampled_from([1e-45, 0.1, 0.5, 0.999999, 1.0]),
        min_p=st.sampled_from([0.0, 1e-45, 0.1, 1.0]),
    )),
)  # fmt: skip
def test_a_draw_is_one_of_what_the_filters_leave(logits, params):
    """Any combination: the token is alive, and every filter's own set holds it."""
    tokens = draw(logits, params)
    sets = kept_by_all(logits, params)
    for row, request, token, ids in zip(np.float32(logits), params, tokens, sets, strict=True):
        assert 0 <= token < VOCAB
        if np.isfinite(row).any():
            assert row[token] > -np.inf
        if request.is_greedy:
            assert token == row.argmax()
        elif np.isfinite(row).any():
            assert token in ids
            assert len(ids) <= (request.top_k or VOCAB)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_k047_ties_are_cut_alike_at_every_batch_size(batch):
    """Exactly k, lowest id first: id 4 and two of 1..3."""
    assert kept("top_k", [[0, 4, 4, 4, 7]] * batch, 3) == [[1, 2, 4]] * batch
    assert kept("top_p", [[0, 0, 0, 0]] * batch, 0.5) == [[0, 1]] * batch
    assert kept("top_p", [[0, 0, 0, 0]] * batch, 0.51) == [[0, 1, 2]] * batch


def test_k047_a_boundary_of_mass_is_the_same_at_every_batch_size():
    """p as close to a cumulative mass as float32 can be: the set must not depend on the order of summation."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 5003)).astype(np.float32) * 3
    p = []
    for i, row in enumerate(logits):
        p.append(np.float32(np.sort(probabilities(row))[::-1][: 40 + 100 * i].sum()))
    whole = kept("top_p", logits, p)
    assert [kept("top_p", logits[i : i + 1], p[i])[0] for i in range(8)] == whole
    assert kept("top_p", logits[::-1][:5], p[::-1][:5]) == whole[::-1][:5]


def test_k048_top_k_comes_before_top_p():
    logits = np.log([[0.1, 0.1, 0.3, 0.5]])
    assert kept_by_all(logits, [SamplingParams(top_k=2, top_p=0.6)]) == [[3]]
    assert kept_by_all(logits, [SamplingParams(top_p=0.6)]) == [[2, 3]]


def test_min_p_comes_before_top_p_and_after_temperature():
    logits = np.log([[0.5, 0.26, 0.24]])
    assert kept_by_all(logits, [SamplingParams(min_p=0.5, top_p=0.66)]) == [[0, 1]]
    assert kept_by_all(logits, [SamplingParams(min_p=0.5, temperature=2.0)]) == [[0, 1, 2]]


@pytest.mark.parametrize("k", [-1, 0, 4, 5, 2**40])
def test_k049_top_k_off_keeps_every_id(k):
    tokens = draw(np.zeros((200, 4)), [SamplingParams(top_k=k, seed=9)] * 200)
    assert np.bincount(tokens, minlength=4).min() > 25


@pytest.mark.parametrize("temperature", [1e-38, 1e-5, 1.1e-5])
def test_k050_tiny_temperatures_with_filters_take_the_best(temperature):
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.99, min_p=1e-6)
    assert draw([[9.5, 2.0, 1.5], [1.5, 2.0, 9.5]], [params] * 2).tolist() == [0, 2]


def test_k051_one_live_id_among_many_is_always_found():
    logits = np.full((1, 32_000), -np.inf)
    logits[0, 1] = 0
    params = [SamplingParams(top_k=2**30, top_p=1.0, seed=5)]
    assert {int(draw(logits, params, [position])[0]) for position in range(50)} == {1}


@pytest.mark.parametrize(
    "params", [dict(top_k=2), dict(top_p=0.5), dict(min_p=0.5), dict(top_k=2, top_p=0.5, min_p=0.5)]
)
def test_k052_damaged_rows_give_an_id_in_range(params):
    """All NaN: id 0. NaN among numbers: the first NaN. +inf: that id. All -inf: id 0. The row beside them is right."""
    rows = np.zeros((6, 8))
    rows[0], rows[1, [3, 5]], rows[2, 4] = np.nan, np.nan, np.inf
    rows[3], rows[4, 6], rows[5] = -np.inf, -np.inf, [0] * 7 + [99]
    tokens = draw(rows, [SamplingParams(**params)] * 6)
    assert tokens[[0, 1, 2, 3, 5]].tolist() == [0, 3, 4, 0, 7]
    assert 0 <= tokens[4] < 8


def test_k053_rows_with_and_without_top_k_share_a_batch():
    logits = np.zeros((2, 50))
    assert kept_by_all(logits, [SamplingParams(top_p=0.999999), SamplingParams(top_k=5)]) == [[*range(50)], [*range(5)]]
    logits = np.zeros((1200, 50))
    tokens = draw(logits, [SamplingParams(top_k=0, seed=1), SamplingParams(top_k=5, seed=2)] * 600)
    assert set(tokens[::2]) == set(range(50))
    assert set(tokens[1::2]) == set(range(5))


@pytest.mark.parametrize("best", [0, 4999])
def test_the_ends_of_the_vocabulary_are_kept(best):
    logits = np.zeros((1, 5000))
    logits[0, best] = 30
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=1e-45), SamplingParams(min_p=1.0)):
        assert kept_by_all(logits, [params]) == [[best]]
    assert kept("top_k", logits, 2) == [sorted({best, 0 if best else 1})]
    assert kept("top_k", logits, 4999) == [sorted(set(range(5000)) - {4999 if best == 0 else 4998})]


def test_a_row_without_a_filter_draws_as_in_the_random_tier():
    """Bit for bit, whatever its neighbours ask for; and greedy rows are the argmax in every tier."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(200, 60)) * 0.5
    plain = [SamplingParams(temperature=t) for t in rng.choice([0.0, 0.7, 1.0], 200)]
    mixed = [p if i % 2 else SamplingParams(temperature=0.7, top_k=3) for i, p in enumerate(plain)]
    tokens, expected = draw(logits, mixed), draw(logits, plain, tier="random")
    np.testing.assert_array_equal(tokens[1::2], expected[1::2])
    assert (tokens[::2] != expected[::2]).any()
    for tier in ("greedy", "random", "filtered"):
        greedy = draw(logits, [SamplingParams(temperature=0.0, top_k=2)] * 200, tier=tier)
        np.testing.assert_array_equal(greedy, logits.astype(np.float32).argmax(-1))


def test_draws_have_the_renormalised_distribution():
    """Chi-square over 20,000 draws; the 99.9 % bound of 3 degrees of freedom is 16.3."""
    count = 20_000
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, 1.5])
    state = jax.tree.map(lambda a: jnp.tile(a, (count, 1)), sampling_state([SamplingParams(top_k=4, seed=11)]))
    tokens = run["filtered"](jnp.tile(jnp.float32(logits), (count, 1)), state, jnp.arange(count))
    observed = np.bincount(np.asarray(tokens), minlength=6)
    expected = np.where(np.isin(np.arange(6), [0, 1, 2, 5]), np.exp(logits), 0)
    expected = count * expected / expected.sum()
    assert not observed[[3, 4]].any()
    assert (((observed - expected) ** 2)[[0, 1, 2, 5]] / expected[[0, 1, 2, 5]]).sum() < 16.3


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 2, 300, 49_152])
def test_integer_masses_are_proportional_and_use_their_bits(spread, vocab):
    row = np.random.default_rng(1).normal(size=vocab) * spread
    ratio = np.exp(row - row.max()).astype(np.float32)
    masses = np.asarray(jax.jit(integer_masses)(ratio[None]))[0].astype(np.int64)
    assert 2**28 <= masses.sum() <= 2**30 + vocab
    np.testing.assert_allclose(masses / masses.sum(), probabilities(row), rtol=1e-5, atol=2.0**-28)
    assert math.isclose(np.cumsum(np.sort(masses))[-1], masses.sum())


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
def test_the_place_where_a_limit_is_reached_is_that_of_a_prefix_sum(vocab):
    """At the edges of chunks, with zeros between, and past the end."""
    rng = np.random.default_rng(vocab)
    weight = (rng.integers(1, 4, (6, vocab)) * (rng.random((6, vocab)) < 0.4)).astype(np.int32)
    for limit in rng.integers(1, max(2, int(weight.sum(axis=1).max()) + 2), (8, 6)):
        before = np.cumsum(weight, axis=1) - weight
        places = np.asarray(jax.jit(first_past)(weight, jnp.asarray(limit, jnp.int32)))
        for row, end in enumerate(places):
            np.testing.assert_array_equal(np.arange(vocab) < end, before[row] < limit[row])
