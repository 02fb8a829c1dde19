"""The optimal ladder: against every possible ladder of small cases, and against the plain recurrence of larger ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.optimal import cost_of, frontier, optimal_sizes


def price(sizes, weights, costs) -> float:
    """Step by step, in Python."""
    total = 0.0
    for row, prices in zip(np.atleast_2d(weights), np.atleast_2d(costs), strict=True):
        for n, weight in enumerate(row, 1):
            total += weight * prices[min(s for s in sizes if s >= n) - 1]
    return total


@st.composite
def cases(draw):
    last, rows = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    numbers = st.lists(st.integers(0, 5), min_size=last, max_size=last)
    weights = np.array([draw(numbers) for _ in range(rows)], float)
    costs = np.cumsum([draw(numbers) for _ in range(rows)], axis=1).astype(float)
    return weights, costs


@settings(max_examples=150, deadline=None)
@given(cases())
def test_no_ladder_of_so_many_rungs_is_cheaper(case):
    weights, costs = case
    last = weights.shape[1]
    for count, fit in enumerate(frontier(weights, costs, last + 1), 1):
        inner = range(1, last)
        ladders = [(*s, last) for k in range(min(count, last)) for s in itertools.combinations(inner, k)]
        assert fit.cost == min(price(s, weights, costs) for s in ladders)
        assert fit.cost == price(fit.sizes, weights, costs) == cost_of(fit.sizes, weights, costs)
        assert len(fit.sizes) <= count
        assert fit.sizes[-1] == last


def test_long_axes_equal_the_plain_recurrence():
    rng = np.random.default_rng(0)
    weights = rng.poisson(3, 300) * (rng.random(300) < 0.4)
    costs = np.cumsum(rng.integers(0, 4, 300)).astype(float)
    cumulated = np.r_[0, np.cumsum(weights)]
    best = np.r_[0, np.cumsum(weights) * costs]
    for fit in frontier(weights, costs, 20):
        assert fit.cost == pytest.approx(best[-1])
        between = [[best[i] + (cumulated[j] - cumulated[i]) * costs[j - 1] for i in range(j)] for j in range(1, 301)]
        best = np.array([0, *map(min, between)])


def test_more_rungs_than_sizes_cost_nothing_more_and_nothing_less():
    fits = frontier(np.ones(4), np.arange(1.0, 5), 7)
    assert [f.cost for f in fits] == [16, 12, 11, 10, 10, 10, 10]
    assert optimal_sizes(np.ones(4), np.arange(1.0, 5), 7) == (1, 2, 3, 4)


@pytest.mark.parametrize(
    ("weights", "costs", "count", "message"),
    [
        ([1, 1], [2, 1], 1, "must not cost less"),
        ([1, -1], [1, 2], 1, "no weight negative"),
        ([1, np.nan], [1, 2], 1, "finite"),
        ([1], [1, 2], 1, "differ in shape"),
        ([1, 1], [1, 2], 0, "at least one rung"),
    ],
)
def test_what_is_refused(weights, costs, count, message):
    with pytest.raises(AdmissionError, match=message):
        frontier(np.array(weights, float), np.array(costs, float), count)


def test_a_ladder_that_ends_early_has_no_cost():
    with pytest.raises(AdmissionError, match="ends at 2"):
        cost_of((1, 2), np.ones(3), np.arange(1.0, 4))
