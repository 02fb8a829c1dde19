"""vLLM's choice of async scheduling, which its runners bound differently at 0.28 and 0.33.

Source: `config/vllm.py` of both releases.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrunner.selection.facts import Facts, RunnerName

DRAFTERS = ("eagle", "eagle3", "mtp", "ngram_gpu", "draft_model", "dspark")
"""Speculative methods with which async scheduling runs: eagle's and mtp's kinds, and those on the device."""


@dataclasses.dataclass(frozen=True)
class AsyncChoice:
    """enabled: None if vLLM raises. why: the reason. warned: vLLM says that it turned it off."""

    enabled: bool | None
    why: str
    warned: bool = False


def async_scheduling(facts: Facts, release: Literal["0.28", "0.33"], runner: RunnerName) -> AsyncChoice:
    """Whether steps are planned ahead. Asked for where it cannot run it raises; left open it is turned off."""
    against = _against(facts, release, runner)
    if facts.async_scheduling is False:
        return AsyncChoice(False, "turned off by the user")
    if facts.async_scheduling and against:
        return AsyncChoice(None, against)
    if facts.async_scheduling is None and facts.pooling_task is not None:
        return AsyncChoice(False, "pooling")
    if against:
        return AsyncChoice(False, against, warned=True)
    return AsyncChoice(True, "nothing stands against it")


def _against(facts: Facts, release: str, runner: RunnerName) -> str:
    limited = release == "0.28" or runner == "host"
    method = facts.spec_method
    if limited and method is not None and method not in DRAFTERS:
        return f"speculative method {method}"
    if limited and facts.disable_padded_drafter_batch:
        return "disable_padded_drafter_batch"
    if release == "0.33" and runner == "host" and facts.pipeline_parallel_size > 1:
        return "pipeline parallelism on V1"
    return "" if facts.executor_supports_async else "the executor does not support it"
