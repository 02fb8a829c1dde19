"""`Trace`: when requests arrive, how long their prompts are and how many tokens they generate."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder import arrivals

PROMPT_MEAN, OUTPUT_MEAN, SPREAD = 512, 160, 0.9


@dataclasses.dataclass(frozen=True)
class Trace:
    """R requests in order of arrival. name: for tables and pictures.

    arrival_s: f64[R], seconds from the begin of the trace, ascending. prompt_tokens, output_tokens: i64[R], at least 1.
    Raises AdmissionError for anything else, and for a trace without requests.
    """

    name: str
    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("arrival_s", np.float64), ("prompt_tokens", np.int64), ("output_tokens", np.int64)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        lengths = {self.arrival_s.shape, self.prompt_tokens.shape, self.output_tokens.shape}
        if len(lengths) != 1 or self.arrival_s.ndim != 1 or not self.arrival_s.size:
            raise AdmissionError(f"the trace {self.name!r} has no requests, or columns of other lengths: {lengths}")
        if not np.isfinite(self.arrival_s).all() or (np.diff(self.arrival_s) < 0).any():
            raise AdmissionError(f"the arrivals of the trace {self.name!r} do not ascend")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise AdmissionError(f"the trace {self.name!r} has a request without prompt or output tokens; leave it out")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, count: int) -> Trace:
        """The first `count` requests."""
        return Trace(self.name, self.arrival_s[:count], self.prompt_tokens[:count], self.output_tokens[:count])

    def limited(self, *, max_model_len: int) -> Trace:
        """The trace as an engine with this context serves it: a request that is too long loses the begin of its prompt,
        then the end of its output."""
        output = np.minimum(self.output_tokens, max_model_len - 1)
        prompt = np.minimum(self.prompt_tokens, max_model_len - output)
        return dataclasses.replace(self, prompt_tokens=prompt, output_tokens=output)

    @classmethod
    def poisson(cls, rate: float, n: int, *, seed: int = 0, **lengths: float) -> Trace:
        """n requests that arrive independently, `rate` a second on average. lengths: prompt_mean, prompt_spread,
        output_mean and output_spread, see `arrivals.lognormal_lengths`."""
        rng = np.random.default_rng(seed)
        return cls._generated(f"Poisson, {rate:g}/s", arrivals.poisson(rng, rate, n), rng, lengths)

    @classmethod
    def bursty(cls, rate: float, n: int, *, seed: int = 0, cv: float = 3.0, **lengths: float) -> Trace:
        """n requests in bursts: gamma-distributed gaps whose standard deviation is `cv` times their mean."""
        rng = np.random.default_rng(seed)
        return cls._generated(f"bursty, {rate:g}/s, cv {cv:g}", arrivals.bursty(rng, rate, n, cv), rng, lengths)

    @classmethod
    def diurnal(
        cls, rate: float, n: int, *, seed: int = 0, period_s: float = 60.0, swing: float = 0.8, **lengths: float
    ) -> Trace:
        """n requests whose rate swings around `rate` by the part `swing` of it, as a sine of `period_s` seconds."""
        rng = np.random.default_rng(seed)
        when = arrivals.diurnal(rng, rate, n, period_s, swing)
        return cls._generated(f"diurnal, {rate:g}/s, every {period_s:g} s", when, rng, lengths)

    @classmethod
    def _generated(cls, name: str, when: np.ndarray, rng: np.random.Generator, lengths: dict[str, float]) -> Trace:
        prompts = arrivals.lognormal_lengths(
            rng, len(when), lengths.pop("prompt_mean", PROMPT_MEAN), lengths.pop("prompt_spread", SPREAD)
        )
        outputs = arrivals.lognormal_lengths(
            rng, len(when), lengths.pop("output_mean", OUTPUT_MEAN), lengths.pop("output_spread", SPREAD)
        )
        if lengths:
            raise AdmissionError(f"unknown options {sorted(lengths)}; lengths have prompt_ and output_ mean and spread")
        return cls(name, when, prompts, outputs)
