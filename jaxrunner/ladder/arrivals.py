"""Arrival models of generated traces, and the lengths of their requests."""

from __future__ import annotations

import numpy as np

from jaxrunner.errors import AdmissionError


def poisson(rng: np.random.Generator, rate: float, n: int) -> np.ndarray:
    """f64[n], seconds: exponential gaps, `rate` arrivals a second."""
    _check(rate > 0 and n > 0, f"rate {rate} and n {n} must be positive")
    return np.cumsum(rng.exponential(1 / rate, n))


def bursty(rng: np.random.Generator, rate: float, n: int, cv: float) -> np.ndarray:
    """f64[n], seconds: gamma gaps of mean 1 / rate and coefficient of variation `cv`; 1 is Poisson, more is bursty."""
    _check(rate > 0 and n > 0 and cv > 0, f"rate {rate}, n {n} and cv {cv} must be positive")
    return np.cumsum(rng.gamma(1 / cv**2, cv**2 / rate, n))


def diurnal(rng: np.random.Generator, rate: float, n: int, period_s: float, swing: float) -> np.ndarray:
    """f64[n], seconds: a Poisson process of the rate `rate * (1 + swing * sin(2 pi t / period_s))`.

    Arrivals of a process of rate 1 are taken through the inverse of the integrated rate, tabulated on a fine grid.
    """
    _check(rate > 0 and n > 0 and period_s > 0, f"rate {rate}, n {n} and period_s {period_s} must be positive")
    _check(0 <= swing <= 1, f"swing {swing} must be from 0 to 1")
    expected = np.cumsum(rng.exponential(1.0, n))
    periods = int(np.ceil(expected[-1] / (rate * period_s))) + 1
    times = np.linspace(0, periods * period_s, periods * 1000 + 1)
    angle = 2 * np.pi / period_s
    return np.interp(expected, rate * (times + swing * (1 - np.cos(angle * times)) / angle), times)


def lognormal_lengths(rng: np.random.Generator, n: int, mean: float, spread: float) -> np.ndarray:
    """i64[n], token counts of at least 1, log-normal: `mean` tokens on average, `spread` the deviation of the
    logarithm."""
    _check(mean >= 1 and spread >= 0, f"a mean length of {mean} must be at least 1, its spread {spread} at least 0")
    return np.maximum(1, np.rint(rng.lognormal(np.log(mean) - spread**2 / 2, spread, n))).astype(np.int64)


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise AdmissionError(message)
