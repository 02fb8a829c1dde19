"""What a runner reports beside tokens: of which numbers log-probabilities are, how many, and what NaN logits do."""

from __future__ import annotations

import dataclasses
import typing
from typing import Literal

from jaxrunner.errors import AdmissionError
from jaxrunner.sampling_params import SamplingParams

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
NanCheck = Literal["off", "count", "fail"]
ALL_IDS = -1
MOST_LOGPROBS = 128
"""Largest bound on best ids: they are found by comparing each with each other, beyond it all ids are the better way."""
DEFAULT_MAX_LOGPROBS = 20


@dataclasses.dataclass(frozen=True)
class Reports:
    """Static: part of every executable that samples.

    logprobs_mode: "raw_logprobs" and "raw_logits" are of the model's own logits (after a grammar, before any other
    parameter of a request), "processed_logprobs" and "processed_logits" of those that the token is drawn from: after
    constraints, temperature and filters, -inf for ids that these drop; of a greedy request, after its constraints.
    The modes of logits give them as they are, those of log-probabilities the natural logarithms of their softmax.
    Prompts are not sampled: theirs are raw in every mode.
    max_logprobs: most best ids a request may ask for, 0 to 128, or -1 for all ids of the vocabulary; then each step
    that reports any makes f32[requests, vocab] more.
    nan_check: "count" reports how many of each request's logits are NaN; "fail" ends a request that has one with an
    error of its own, where otherwise the first NaN's id is its token. Both read the logits once more.
    Source: vLLM's `logprobs_mode`, `max_logprobs`, VLLM_COMPUTE_NANS_IN_LOGITS and VLLM_RAISE_ON_LOGIT_NANS.
    """

    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    nan_check: NanCheck = "off"

    def __post_init__(self) -> None:
        for name, choices in (("logprobs_mode", LogprobsMode), ("nan_check", NanCheck)):
            if (value := getattr(self, name)) not in typing.get_args(choices):
                raise AdmissionError(f"{name} is {value!r}; use one of {typing.get_args(choices)}")
        if not ALL_IDS <= self.max_logprobs <= MOST_LOGPROBS:
            raise AdmissionError(
                f"max_logprobs is {self.max_logprobs}; it must be 0 to {MOST_LOGPROBS}, or {ALL_IDS} for all ids"
            )

    @property
    def is_processed(self) -> bool:
        return self.logprobs_mode.startswith("processed")

    @property
    def is_logits(self) -> bool:
        return self.logprobs_mode.endswith("logits")

    @property
    def has_all_ids(self) -> bool:
        """Whether requests may ask for more than the best."""
        return self.max_logprobs == ALL_IDS

    @property
    def num_best(self) -> int:
        """Best ids that are always found."""
        return DEFAULT_MAX_LOGPROBS if self.has_all_ids else max(self.max_logprobs, 1)


DEFAULT_REPORTS = Reports()


def raw(reports: Reports) -> Reports:
    """The same of the model's own logits."""
    return dataclasses.replace(reports, logprobs_mode="raw_logits" if reports.is_logits else "raw_logprobs")


def check_reports(params: SamplingParams, reports: Reports, *, where: str = "request") -> None:
    """Raises AdmissionError for a request that asks for more best ids than `reports` has."""
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is None or reports.has_all_ids or 0 <= asked <= reports.max_logprobs:
            continue
        way = f"max_logprobs={asked} or " if asked <= MOST_LOGPROBS and asked != ALL_IDS else ""
        raise AdmissionError(
            f"{where}: {name} is {asked}; at most {reports.max_logprobs} are given here. Ask for fewer, name the ids "
            f"in logprob_token_ids, or start with {way}max_logprobs=-1, all ids (of RunnerConfig and LLM)"
        )
