"""Fitting a ladder to recorded or simulated steps.

What one half of a trace shows is a sample: the next half has sizes that the first had not, and a ladder that follows
every count of the first pads those far. So counts are smoothed before the ladder is chosen: each is spread over its
neighbourhood on a logarithmic axis, and a small part over all sizes. How wide is chosen on the given steps alone, by
fitting on their first part and judging on the rest.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.compile.ladder import Ladder, default_finish
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.optimal import Fit, cost_of, frontier
from jaxrunner.ladder.steps import Steps

WIDTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Standard deviations of the logarithm of a size that are tried."""
BACKGROUND = 0.01
"""Part of the weight that is spread over all sizes, equally on a logarithmic axis."""
FITTED_PART = 0.5
"""Part of the given steps that a width is tried with."""


@dataclasses.dataclass(frozen=True)
class Fitted:
    """ladder: for an engine (`LLM(ladder=...)`, `DeviceRunner(ladder=...)`). frontier: cost of the best ladder of 1, 2,
    ... buckets over the smoothed steps, in the unit of the costs; its last entry is `ladder`'s. widths: of decode and
    mixed steps, chosen from WIDTHS."""

    ladder: Ladder
    frontier: tuple[float, ...]
    widths: tuple[float, float]


def fit_ladder(
    steps: Steps, buckets: int, costs: Costs, *, max_num_seqs: int, max_num_batched_tokens: int, query_len: int = 1
) -> Fitted:
    """The best ladder of at most `buckets` rungs, decodes and ragged steps together, for steps like these.

    The last rung of each axis is the exact maximum, so every step of an engine of these sizes has a bucket. Raises
    AdmissionError for fewer than 2 buckets, no steps, and steps that such an engine cannot run.
    """
    if buckets < 2:
        raise AdmissionError(f"a ladder has at least one rung for decodes and one for ragged steps, not {buckets} in all")
    if not len(steps):
        raise AdmissionError("there are no steps to fit a ladder to")
    if steps.num_reqs.max() > max_num_seqs or steps.num_tokens.max() > max_num_batched_tokens:
        raise AdmissionError(
            f"steps of {steps.num_reqs.max()} requests and {steps.num_tokens.max()} tokens do not fit max_num_seqs="
            f"{max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}"
        )
    decode = steps.uniform_query_len == query_len
    axes = (
        (steps.num_reqs[decode], costs.bucket("decode", query_len * np.arange(1, max_num_seqs + 1))),
        (steps.num_tokens[~decode], costs.bucket("mixed", np.arange(1, max_num_batched_tokens + 1))),
    )
    fits, widths = [], []
    for sizes, prices in axes:
        width = best_width([sizes], [prices], buckets)
        widths.append(width)
        fits.append(frontier(_smoothed(sizes, len(prices), width), prices, buckets - 1))
    shares = [_best_share(fits[0], fits[1], total) for total in range(2, buckets + 1)]
    decodes, ragged = (fits[axis][shares[-1][axis] - 1].sizes for axis in (0, 1))
    total = tuple(fits[0][d - 1].cost + fits[1][m - 1].cost for d, m in shares)
    ladder = Ladder(decodes, ragged, default_finish(max_num_seqs), query_len=query_len)
    return Fitted(ladder, (float("inf"), *total), (widths[0], widths[1]))


def fit_capture_sizes(steps: Steps, count: int, costs: Costs, *, largest: int, query_len: int = 1) -> tuple[int, ...]:
    """The best list of at most `count` CUDA-graph capture sizes, shared by decodes and other steps, up to `largest`
    exactly. Larger steps have no graph and no padding, so they do not count."""
    decode = steps.uniform_query_len == query_len
    prices = [costs.bucket(kind, np.arange(1, largest + 1)) for kind in ("decode", "mixed")]
    parts = [steps.num_tokens[mask & (steps.num_tokens <= largest)] for mask in (decode, ~decode)]
    if not sum(map(len, parts)):
        raise AdmissionError(f"no step has {largest} tokens or fewer; there is nothing to fit capture sizes to")
    width = best_width(parts, prices, count)
    weights = np.stack([_smoothed(part, largest, width) for part in parts])
    return frontier(weights, np.stack(prices), count)[-1].sizes


def worthwhile(costs_of_frontier: tuple[float, ...], make_seconds: float, steps_seconds: float, horizon_s: float) -> int:
    """How many buckets pay for themselves: the count that costs least over `horizon_s` seconds of this load.

    costs_of_frontier: seconds of the fitted steps with 1, 2, ... buckets. make_seconds: of one bucket. steps_seconds:
    how long the fitted steps took in the trace, so that the horizon is so many times as many steps.
    """
    counts = np.arange(1, len(costs_of_frontier) + 1)
    return int(counts[np.argmin(np.array(costs_of_frontier) * (horizon_s / steps_seconds) + make_seconds * counts)])


def best_width(parts: list[np.ndarray], prices: list[np.ndarray], count: int) -> float:
    """The width of WIDTHS that does best when it is fitted on the first part of each axis and judged on the rest."""
    cuts = [int(len(part) * FITTED_PART) for part in parts]
    if not any(cuts):
        return WIDTHS[-1]
    last = len(prices[0])
    judged = np.stack([_histogram(part[cut:], last) for part, cut in zip(parts, cuts, strict=True)])

    def cost(width: float) -> float:
        weights = np.stack([_smoothed(part[:cut], last, width) for part, cut in zip(parts, cuts, strict=True)])
        return cost_of(frontier(weights, np.stack(prices), count)[-1].sizes, judged, np.stack(prices))

    return min(WIDTHS, key=cost)


def _best_share(decode: list[Fit], mixed: list[Fit], total: int) -> tuple[int, int]:
    """How `total` buckets are best divided between the two axes."""
    return min(((d, total - d) for d in range(1, total)), key=lambda s: decode[s[0] - 1].cost + mixed[s[1] - 1].cost)


def _histogram(sizes: np.ndarray, last: int) -> np.ndarray:
    return np.bincount(sizes, minlength=last + 1)[1:].astype(np.float64)


def _smoothed(sizes: np.ndarray, last: int, width: float) -> np.ndarray:
    """f64[last], weights of the sizes 1..last with the sum of `sizes`' counts (of one step if there is none)."""
    counts = _histogram(sizes, last)
    total = max(1.0, counts.sum())
    every = np.arange(1, last + 1)
    background = (1 / every) / (1 / every).sum()
    if width > 0 and counts.any():
        counts = _spread(counts, every, width)
    return (1 - BACKGROUND) * counts + BACKGROUND * total * background


def _spread(counts: np.ndarray, every: np.ndarray, width: float) -> np.ndarray:
    """Each count spread over the sizes around it, by a normal density of the logarithm of the size."""
    result = np.zeros_like(counts)
    for size in np.flatnonzero(counts) + 1:
        low, high = int(size * np.exp(-3 * width)), int(np.ceil(size * np.exp(3 * width)))
        near = every[max(0, low - 1) : high]
        density = np.exp(-0.5 * (np.log(near / size) / width) ** 2) / near
        result[near - 1] += counts[size - 1] * density / density.sum()
    return result
