"""Fitting a ladder to recorded or simulated steps.

What one half of a trace shows is a sample: the next half has sizes that the first had not, and a ladder that follows
every count of the first pads those far. So counts are smoothed before the ladder is chosen: each is spread over its
neighbourhood on a logarithmic axis, and a part of all weight over all sizes. How wide, and how large a part, is chosen
on the given steps alone: each choice is fitted on one quarter of their time and judged on the rest, four times. To fit
on less than is judged on prefers ladders that can bear a change of load. Where what follows shares no sizes with what
was seen, as in an engine whose queue only grows, equally spaced sizes can still do better.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from jaxrunner.compile.ladder import Ladder, default_finish
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.optimal import Fit, cost_of, frontier
from jaxrunner.ladder.steps import Steps

EXACT, GRID = 512, 8
"""Every size up to the first may be a rung, beyond it only multiples of the second, and the maximum: a pad of less than
two in a hundred, and long axes are quick to fit."""


@dataclasses.dataclass(frozen=True)
class Smoothing:
    """width: standard deviation of the logarithm of a size. background: part of the weight that is spread over all
    sizes, half of it equally on a linear axis and half on a logarithmic one."""

    width: float
    background: float


CHOICES = tuple(Smoothing(w, b) for w, b in itertools.product((0.0, 0.1, 0.3), (0.01, 0.03, 0.1)))
FOLDS = 4
JUDGED_RUNGS = 12
"""Most rungs that a choice of smoothing is judged with."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """ladders: the best ones of 2, 3, ... buckets, all over the same smoothed steps. smoothing: of decode and of ragged
    steps, chosen for the last of them."""

    ladders: tuple[Ladder, ...]
    smoothing: tuple[Smoothing, Smoothing]

    @property
    def ladder(self) -> Ladder:
        """The one of as many buckets as were asked for; `LLM(ladder=...)` and `DeviceRunner(ladder=...)` take it."""
        return self.ladders[-1]


def fit_ladder(
    steps: Steps, buckets: int, costs: Costs, *, max_num_seqs: int, max_num_batched_tokens: int, query_len: int = 1
) -> Fitted:
    """The best ladder of at most `buckets` rungs, decodes and ragged steps together, for steps like these.

    The last rung of each axis is the exact maximum, so every step of an engine of these sizes has a bucket. Raises
    AdmissionError for fewer than 2 buckets, no steps, and steps that such an engine cannot run.
    """
    if buckets < 2:
        raise AdmissionError(f"a ladder has a rung for decodes and one for ragged steps at least, not {buckets} in all")
    if not len(steps):
        raise AdmissionError("there are no steps to fit a ladder to")
    if steps.num_reqs.max() > max_num_seqs or steps.num_tokens.max() > max_num_batched_tokens:
        raise AdmissionError(
            f"steps of {steps.num_reqs.max()} requests and {steps.num_tokens.max()} tokens do not fit max_num_seqs="
            f"{max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}"
        )
    uniform = steps.uniform_query_len == query_len
    decode = _Axis.of([steps.num_reqs[uniform]], [max_num_seqs], lambda n: [costs.bucket("decode", n * query_len)])
    mixed = _Axis.of([steps.num_tokens[~uniform]], [max_num_batched_tokens], lambda n: [costs.bucket("mixed", n)])
    smoothing = (decode.best_smoothing(buckets - 1), mixed.best_smoothing(buckets - 1))
    decodes, ragged = decode.fit(smoothing[0], buckets - 1), mixed.fit(smoothing[1], buckets - 1)
    finish = default_finish(max_num_seqs)
    ladders = []
    for total in range(2, buckets + 1):
        d, m = _best_share(decodes, ragged, total)
        ladders.append(Ladder(decodes[d - 1].sizes, ragged[m - 1].sizes, finish, query_len=query_len))
    return Fitted(tuple(ladders), smoothing)


def fit_capture_sizes(
    steps: Steps, count: int, costs: Costs, *, max_num_seqs: int, largest: int, query_len: int = 1
) -> tuple[int, ...]:
    """The best list of at most `count` CUDA-graph capture sizes, shared by decodes and other steps, up to `largest`
    exactly. Larger steps have no graph and no padding, so they do not count."""
    uniform = steps.uniform_query_len == query_len
    parts = [steps.num_tokens[mask & (steps.num_tokens <= largest)] for mask in (uniform, ~uniform)]
    if not sum(map(len, parts)):
        raise AdmissionError(f"no step has {largest} tokens or fewer; there is nothing to fit capture sizes to")
    lasts = [min(largest, max_num_seqs * query_len), largest]
    axis = _Axis.of(parts, lasts, lambda n: [costs.bucket("decode", n), costs.bucket("mixed", n)])
    return axis.fit(axis.best_smoothing(count), count)[-1].sizes


def worthwhile(costs_s: Sequence[float], make_s: Sequence[float], covered_s: float, horizon_s: float) -> int:
    """Which of several ladders pays best: the index of the least `costs_s * horizon_s / covered_s + make_s`.

    costs_s: seconds of the same steps in each ladder. make_s: seconds to make each. covered_s: how much of the load's
    time the steps cover. horizon_s: how long the engine will serve this load.
    """
    return int(np.argmin(np.array(costs_s) * (horizon_s / covered_s) + np.array(make_s)))


def candidate_rungs(last: int) -> np.ndarray:
    """Sizes that may be rungs, see EXACT and GRID: i64, ascending, the last is `last`."""
    exact, coarse = np.arange(1, min(EXACT, last) + 1), np.arange(EXACT + GRID, last, GRID)
    return np.concatenate([exact, coarse, [last] if last > EXACT else []]).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """Sizes of steps that share rungs. parts: sizes in order of time, one array for each distribution; lasts: the
    largest size of each. rungs: the candidates. prices: f64[A, len(rungs)]."""

    parts: list[np.ndarray]
    lasts: list[int]
    rungs: np.ndarray
    prices: np.ndarray

    @classmethod
    def of(cls, parts: list[np.ndarray], lasts: list[int], prices: Callable[[np.ndarray], list[np.ndarray]]) -> _Axis:
        rungs = candidate_rungs(max(lasts))
        return cls(parts, lasts, rungs, np.stack(prices(rungs)))

    def fit(self, smoothing: Smoothing, count: int) -> list[Fit]:
        """The best ladders of at most 1, 2, ... `count` rungs."""
        fits = frontier(self._weights(self.parts, smoothing), self.prices, count)
        return [Fit(tuple(self.rungs[np.array(f.sizes) - 1].tolist()), f.cost) for f in fits]

    def best_smoothing(self, count: int) -> Smoothing:
        """The one of CHOICES that does best on steps that it was not fitted on."""
        if sum(map(len, self.parts)) < 2 * FOLDS:
            return CHOICES[-1]
        count = min(count, JUDGED_RUNGS)
        folds = [[np.array_split(part, FOLDS)[i] for part in self.parts] for i in range(FOLDS)]
        counts = [self._weights(fold, None) for fold in folds]

        def cost(smoothing: Smoothing) -> float:
            total = 0.0
            for fold, own in zip(folds, counts, strict=True):
                rungs = frontier(self._weights(fold, smoothing), self.prices, count)[-1].sizes
                total += cost_of(rungs, sum(counts) - own, self.prices)
            return total

        return min(CHOICES, key=cost)

    def _weights(self, parts: list[np.ndarray], smoothing: Smoothing | None) -> np.ndarray:
        """f64[A, len(rungs)]: steps that have each candidate as the smallest one that holds them."""
        weights = np.zeros(self.prices.shape)
        for row, part, last in zip(weights, parts, self.lasts, strict=True):
            counts = np.bincount(part, minlength=last + 1)[1:].astype(np.float64)
            if smoothing is not None:
                counts = _smoothed(counts, smoothing)
            np.add.at(row, np.searchsorted(self.rungs, np.arange(1, last + 1)), counts)
        return weights


def _best_share(decode: list[Fit], mixed: list[Fit], total: int) -> tuple[int, int]:
    """How `total` buckets are best divided between the two axes."""
    return min(((d, total - d) for d in range(1, total)), key=lambda s: decode[s[0] - 1].cost + mixed[s[1] - 1].cost)


def _smoothed(counts: np.ndarray, smoothing: Smoothing) -> np.ndarray:
    """Weights of the sizes 1, 2, ... with the sum of the counts, or 1 if all are zero."""
    every = np.arange(1, len(counts) + 1)
    background = 0.5 / len(every) + 0.5 / every / (1 / every).sum()
    part = smoothing.background if counts.any() else 1.0
    return (1 - part) * _spread(counts, smoothing.width) + part * max(1.0, counts.sum()) * background


def _spread(counts: np.ndarray, width: float) -> np.ndarray:
    """Each count spread over the sizes around it, by a normal density of the logarithm of the size."""
    if width == 0:
        return counts
    result = np.zeros_like(counts)
    for size in np.flatnonzero(counts) + 1:
        low, high = max(1, int(size * np.exp(-3 * width))), int(np.ceil(size * np.exp(3 * width)))
        near = np.arange(low, min(high, len(counts)) + 1)
        density = np.exp(-0.5 * (np.log(near / size) / width) ** 2) / near
        result[near - 1] += counts[size - 1] * density / density.sum()
    return result
