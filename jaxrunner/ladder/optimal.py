"""Optimal sizes: the ladder of so many rungs that costs least over a given distribution of step sizes.

A step of size n runs in the smallest rung m >= n and costs c(m). Choosing at most K rungs, the last one fixed, is the
partition of 1..N into at most K intervals, each priced at its right end:

    F_k(j) = min over i < j of F_{k-1}(i) + (W(j) - W(i)) * c(j),     W = cumulated weights

Because c does not fall, the price of an interval satisfies the quadrangle inequality, so the best i does not fall as j
grows and each F_k takes O(N log N) by divide and conquer (Yao 1980; Galil and Park 1992) instead of O(N^2). Several
distributions that share the rungs, each with costs of its own, add up and keep the inequality.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.errors import AdmissionError


@dataclasses.dataclass(frozen=True)
class Fit:
    """sizes: the rungs, ascending; the last is the largest size that was asked for. cost: sum over the distribution."""

    sizes: tuple[int, ...]
    cost: float


def frontier(weights: np.ndarray, costs: np.ndarray, count: int) -> list[Fit]:
    """The best ladders of at most 1, 2, ... `count` rungs over the sizes 1..N. All are optimal, not approximate.

    weights: f64[N] or f64[A, N], how many steps have size 1..N; rows are distributions that share the rungs. costs: of
    the same shape, what a step costs in a rung of that size; must not fall along a row. O(count N log N).
    Raises AdmissionError for costs that fall, negative weights, and shapes that differ.
    """
    weights, costs = np.atleast_2d(np.asarray(weights, np.float64)), np.atleast_2d(np.asarray(costs, np.float64))
    if weights.shape != costs.shape or not weights.size:
        raise AdmissionError(f"weights and costs differ in shape: {weights.shape}, {costs.shape}")
    if count < 1:
        raise AdmissionError(f"a ladder has at least one rung, not {count}")
    if not np.isfinite(weights).all() or not np.isfinite(costs).all() or (weights < 0).any():
        raise AdmissionError("weights and costs must be finite, and no weight negative")
    if (np.diff(costs, axis=1) < 0).any():
        raise AdmissionError("a larger rung must not cost less; level the costs first (np.maximum.accumulate)")
    padded = np.zeros((len(weights), weights.shape[1] + 1))
    cumulated, price = padded.copy(), padded
    np.cumsum(weights, axis=1, out=cumulated[:, 1:])
    price[:, 1:] = costs
    best = (cumulated * price).sum(axis=0)  # one rung for everything up to j
    choices = [np.zeros(len(best), np.int64)]
    fits = [_fit(best, choices)]
    for _ in range(1, min(count, weights.shape[1])):
        best, choice = _one_rung_more(best, cumulated, price)
        choices.append(choice)
        fits.append(_fit(best, choices))
    return fits + [fits[-1]] * (count - len(fits))


def optimal_sizes(weights: np.ndarray, costs: np.ndarray, count: int) -> tuple[int, ...]:
    """The best ladder of at most `count` rungs, see `frontier`."""
    return frontier(weights, costs, count)[-1].sizes


def cost_of(sizes: tuple[int, ...], weights: np.ndarray, costs: np.ndarray) -> float:
    """What the distribution costs in a given ladder, see `frontier`. The last size must be N or more steps than it
    holds must have no weight."""
    weights, costs = np.atleast_2d(weights), np.atleast_2d(costs)
    place = np.searchsorted(sizes, np.arange(1, weights.shape[1] + 1))
    if weights[:, place == len(sizes)].any():
        raise AdmissionError(f"the ladder ends at {sizes[-1]}, below sizes that occur")
    rung = np.asarray(sizes)[np.minimum(place, len(sizes) - 1)]
    return float((weights * costs[:, rung - 1]).sum())


def _one_rung_more(best: np.ndarray, cumulated: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(F_k, its choices) from F_{k-1}: level by level, every j between two that are known, all j of a level at once."""
    last = len(best) - 1
    result, choice = np.zeros_like(best), np.zeros(len(best), np.int64)
    stride = 1 << last.bit_length()
    while stride := stride >> 1:
        j = np.arange(stride, last + 1, 2 * stride)
        low = choice[j - stride]
        above = j + stride
        high = np.minimum(np.where(above <= last, choice[np.minimum(above, last)], last), j - 1)
        length = high - low + 1
        starts = np.cumsum(length) - length
        owner = np.repeat(np.arange(len(j)), length)
        i = low[owner] + np.arange(len(owner)) - starts[owner]
        value = best[i] + ((cumulated[:, j[owner]] - cumulated[:, i]) * price[:, j[owner]]).sum(axis=0)
        least = np.minimum.reduceat(value, starts)
        first = np.flatnonzero(value == least[owner])
        _, where = np.unique(owner[first], return_index=True)
        result[j], choice[j] = least, i[first[where]]
    return result, choice


def _fit(best: np.ndarray, choices: list[np.ndarray]) -> Fit:
    """Follow the choices back from the last size."""
    j, sizes = len(best) - 1, []
    for choice in reversed(choices):
        if j == 0:
            break
        sizes.append(j)
        j = int(choice[j])
    return Fit(tuple(reversed(sizes)), float(best[-1]))
