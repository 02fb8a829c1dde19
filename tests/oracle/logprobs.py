"""Log-probabilities of one row of logits in plain NumPy, float64. Shares no code with the package."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64[V]; -inf stays -inf, and a row of -inf is one of -inf."""
    logits = np.asarray(logits, np.float64)
    best = logits.max()
    if best == -np.inf:
        return logits
    return logits - best - np.log(np.exp(logits - best).sum())


def best_ids(scores: np.ndarray, count: int) -> list[int]:
    """The higher first, among equals the lower id."""
    return sorted(range(len(scores)), key=lambda t: (-scores[t], t))[:count]


def rank(scores: np.ndarray, token: int) -> int:
    return int((np.asarray(scores) >= scores[token]).sum())


def entry(scores: np.ndarray, chosen: int, count: int, listed: tuple[int, ...] = ()) -> dict[int, tuple]:
    """id -> (number, rank), the chosen id first, each once. scores: log-probabilities, or logits."""
    found = {chosen: (scores[chosen], rank(scores, chosen))}
    for place, token in enumerate(best_ids(scores, count), 1):
        found.setdefault(token, (scores[token], place))
    for token in listed:
        found.setdefault(token, (scores[token], None))
    return found
