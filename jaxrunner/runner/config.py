"""`RunnerConfig`: the sizes and policies of a runner; each limit is checked here and each error names the fix."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrunner.compile.table import POLICIES, Policy
from jaxrunner.errors import AdmissionError
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.custom import CustomSampling
from jaxrunner.selection.facts import RUNNER_NAMES, RunnerName
from jaxrunner.state.kv_dtype import kv_dtype
from jaxrunner.state.reports import DEFAULT_MAX_LOGPROBS, LogprobsMode, NanCheck, Reports
from jaxrunner.state.request_lists import DEFAULT_LIST_SIZES, ListSizes
from jaxrunner.state.runner_state import RunnerState, init_state
from jaxrunner.state.sampling import ThinkingTokens


@dataclasses.dataclass(frozen=True)
class RunnerConfig:
    """max_num_seqs: requests in the state at a time. max_model_len: most tokens of a request.
    max_num_batched_tokens: most tokens in a step. num_blocks: allocator blocks of each KV-cache group, the null block
    included. block_size: tokens in an allocator block; kernel_block_size: tokens in a kernel block (divides it; the
    same by default). kv_cache_dtype, kv_scales: see `init_state`.
    async_scheduling: `sample_tokens` returns an output that is still on its way.
    list_sizes: how many stop ids, biases, allowed ids, ... a request may bring. thinking: the ids around the model's
    thinking, for requests with a thinking budget. logprobs_mode, max_logprobs, nan_check: see `Reports`.
    logits_processors, sampler: functions of your own, see `jaxrunner.sampling.custom`.
    bucket_policy: see `BucketTable`. executable_cache: a directory of this user's own in which executables are kept for
    the next start, "off" for none; by default see `open_cache`. implementation: see `jaxrunner.pallas.implementation`.
    check_invariants: audit the plan of every step (slow; for tests).
    runner: "device" or "host", the runner to build; None leaves it to JAXRUNNER_RUNNER and then to the policy, see
    `jaxrunner.selection`.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int
    block_size: int = 16
    kernel_block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_scales: tuple[tuple[float, float], ...] | None = None
    async_scheduling: bool = False
    list_sizes: ListSizes = DEFAULT_LIST_SIZES
    thinking: ThinkingTokens | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    nan_check: NanCheck = "off"
    logits_processors: Any = ()
    sampler: Any = None
    bucket_policy: Policy = "compile"
    executable_cache: str | None = None
    implementation: Implementation = None
    check_invariants: bool = False
    runner: RunnerName | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise AdmissionError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.block_size % self.kernel_block:
            raise AdmissionError(f"kernel_block_size {self.kernel_block} must divide block_size {self.block_size}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise AdmissionError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "a step could not decode every request; raise the first or lower the second"
            )
        kv_dtype(self.kv_cache_dtype, "float32")
        _ = self.reports  # which raises for a mode or a number that does not exist
        object.__setattr__(self, "logits_processors", self.custom.logits_processors)
        object.__setattr__(self, "sampler", self.custom.sampler)
        if self.bucket_policy not in POLICIES:
            raise AdmissionError(f"unknown bucket_policy {self.bucket_policy!r}; use one of {POLICIES}")
        if self.runner not in (None, *RUNNER_NAMES):
            raise AdmissionError(f"runner is {self.runner!r}; use one of {RUNNER_NAMES}")

    @property
    def reports(self) -> Reports:
        return Reports(self.logprobs_mode, self.max_logprobs, self.nan_check)

    @property
    def custom(self) -> CustomSampling:
        return CustomSampling.of(self.logits_processors, self.sampler)

    @property
    def kernel_block(self) -> int:
        return self.kernel_block_size or self.block_size

    @property
    def blocks_per_kv_block(self) -> int:
        return self.block_size // self.kernel_block


def empty_state(model: Model, config: RunnerConfig) -> RunnerState:
    """The state a runner of this configuration starts with."""
    return init_state(
        model,
        max_requests=config.max_num_seqs,
        max_model_len=config.max_model_len,
        num_blocks=config.num_blocks * config.blocks_per_kv_block,
        block_size=config.kernel_block,
        blocks_per_kv_block=config.blocks_per_kv_block,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_scales=config.kv_scales,
        list_sizes=config.list_sizes,
        thinking=config.thinking,
        reports=config.reports,
        logits_processors=config.logits_processors,
        sampler=config.sampler,
    )
