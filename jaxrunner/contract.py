"""The contract with a scheduler: `SchedulerOutput` in, `ModelRunnerOutput` out, with vLLM's field names and meanings.

A field that a runner of this package does not act on yet must be empty; `runner.admission` refuses it by name.
Source: vLLM 0.28, `v1/core/sched/output.py` and `v1/outputs.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from jaxrunner.sampling_params import SamplingParams

NO_TOKEN = -1
"""Stands in arrays where nothing was sampled."""


@dataclasses.dataclass
class NewRequestData:
    """A request the runner sees for the first time, or again after a preemption.

    block_ids: allocator block ids, one list per KV-cache group. num_computed_tokens: tokens whose KV is already in
    those blocks (prefix cache). prefill_token_ids: all tokens known so far (prompt, then outputs from before a
    preemption); None for the prompt alone.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    sampling_params: SamplingParams | None
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0
    prefill_token_ids: list[int] | None = None
    mm_features: list[Any] = dataclasses.field(default_factory=list)
    pooling_params: Any = None
    lora_request: Any = None
    prompt_embeds: Any = None
    prompt_is_token_ids: list[bool] | None = None


@dataclasses.dataclass
class CachedRequestData:
    """Differences for requests the runner knows; parallel lists.

    new_block_ids: per request, blocks to append (one list per group), or None. num_computed_tokens: the scheduler's
    number, a mirror: the device's own count is the truth and is never overwritten by it.
    resumed_req_ids, new_token_ids, all_token_ids: used by vLLM's V1 runner and by pipeline parallelism only.
    """

    req_ids: list[str] = dataclasses.field(default_factory=list)
    new_block_ids: list[tuple[list[int], ...] | None] = dataclasses.field(default_factory=list)
    num_computed_tokens: list[int] = dataclasses.field(default_factory=list)
    num_output_tokens: list[int] = dataclasses.field(default_factory=list)
    resumed_req_ids: set[str] = dataclasses.field(default_factory=set)
    new_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    all_token_ids: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)

    def with_new_blocks(self) -> tuple[list[int], list[tuple[list[int], ...]]]:
        """(places of the requests whose tables grow, by what each does); few in a decode step."""
        given, num_without = self.new_block_ids, self.new_block_ids.count(None)
        if num_without == len(given):
            return [], []
        places, blocks = [*itertools.compress(range(len(given)), given)], [*filter(None, given)]
        if len(places) + num_without != len(given):  # one is empty, and not None
            places = [place for place, each in enumerate(given) if each is not None]
            blocks = [each for each in given if each is not None]
        return places, blocks

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        return cls()


@dataclasses.dataclass(frozen=True)
class KVCacheBlockCopy:
    """A copy-on-write copy of one allocator block, in every KV-cache group."""

    src_block_id: int
    dst_block_id: int


class TokenCounts(dict[str, int]):
    """Request id -> tokens to run, for good: every change raises TypeError. Plans that say the same may share one, and
    who has looked at it once need not do so again. A copy of it is a plain dict."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("these numbers of tokens are shared by several plans; change a copy, dict(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclasses.dataclass
class SchedulerOutput:
    """One step's plan.

    num_scheduled_tokens: request id -> tokens to run, drafts included, as a dict or as `TokenCounts`.
    finished_req_ids: requests to free before anything is added; may contain an id that is also new (abort and
    resubmission under one id).
    preempted_req_ids: their rows are freed like those of finished requests. new_block_ids_to_zero: allocator blocks
    zeroed before the forward pass; kv_cache_block_copies: copies made after that and before the forward pass.
    has_structured_output_requests: a request of the plan has structured_outputs; pending_structured_output_tokens: the
    mask of one needs a token that is still on its way. They are the scheduler's word to the engine, which takes earlier
    results before it calls `sample_tokens`; a runner knows its requests and misses no mask silently.
    """

    scheduled_new_reqs: list[NewRequestData] = dataclasses.field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = dataclasses.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    num_common_prefix_blocks: list[int] = dataclasses.field(default_factory=list)
    finished_req_ids: set[str] = dataclasses.field(default_factory=set)
    free_encoder_mm_hashes: list[str] = dataclasses.field(default_factory=list)
    scheduled_encoder_input_stats: Any = None
    preempted_req_ids: set[str] | None = None
    has_structured_output_requests: bool = False
    pending_structured_output_tokens: bool = False
    num_invalid_spec_tokens: dict[str, int] | None = None
    kv_connector_metadata: Any = None
    ec_connector_metadata: Any = None
    ec_manager_metadata: Any = None
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[KVCacheBlockCopy] | None = None
    partial_tail_offloads: dict[str, list[tuple[int, int, int]]] | None = None
    num_spec_tokens_to_schedule: int = 0

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        return cls()


@dataclasses.dataclass
class GrammarOutput:
    """Masks of requests with structured_outputs, one row each.

    grammar_bitmask: i32[rows, ceil(vocab / 32)], bit set = allowed, lowest bit first, in the order of
    structured_output_request_ids. Never written after it was given to a runner.
    """

    structured_output_request_ids: list[str]
    grammar_bitmask: np.ndarray


@dataclasses.dataclass
class KVConnectorOutput:
    """What a KV connector reports. expected_finished_count does not count as content."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: Any = None
    kv_cache_events: Any = None
    kv_connector_worker_meta: Any = None
    invalid_block_ids: set[int] = dataclasses.field(default_factory=set)
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        return not any(
            (
                self.finished_sending,
                self.finished_recving,
                self.kv_connector_stats,
                self.kv_cache_events,
                self.kv_connector_worker_meta,
                self.invalid_block_ids,
            )
        )


@dataclasses.dataclass
class ECConnectorOutput:
    """What an encoder-cache connector reports."""

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    ec_connector_worker_meta: Any = None


class LogprobsLists(NamedTuple):
    """Log-probabilities of a step, one row a request in the order of `req_ids`, or of a prompt, one row a token from
    the second on. N is the most that a request asked for.

    logprob_token_ids: i32[B, N + 1], the sampled id (or the prompt's), then the best ids in order, which may hold it
    again, then the ids that the request listed. logprobs: f32[B, N + 1], natural logarithms (or logits). Columns past
    what a request asked for, and rows of requests that asked for nothing or got no token, hold the id -1 with -inf.
    sampled_token_ranks: i32[B], 1 for the best, 0 in such rows; the best ids have the ranks 1, 2, ...
    cu_num_generated_tokens: first row of each request if it has other than one.
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """The rows of one request."""
        start = req_idx if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[req_idx]
        rows = slice(start, start + num_positions)
        return LogprobsLists(self.logprob_token_ids[rows], self.logprobs[rows], self.sampled_token_ranks[rows])


class SamplingMaskLists(NamedTuple):
    """Ids that each request's token was drawn from, one list after the other.

    token_ids: i32[N], ascending within a request. cu_num_tokens: i32[B + 1], where the list of each request begins and
    the last one ends; that of a request that asked for none, or got no token, is empty.
    """

    token_ids: np.ndarray
    cu_num_tokens: np.ndarray

    def of_request(self, req_idx: int) -> np.ndarray:
        """i32[n], the list of one request."""
        return self.token_ids[self.cu_num_tokens[req_idx] : self.cu_num_tokens[req_idx + 1]]


@dataclasses.dataclass
class ModelRunnerOutput:
    """One step's result.

    req_ids: in batch order. sampled_token_ids: per request; empty while its prefill is unfinished. logprobs: None if
    no request of the step asks for any. sampling_masks: likewise. prompt_logprobs_dict,
    prompt_token_id_logprobs_dict: of requests that ask, in the step that completes their prompt (of two tokens or
    more): a `LogprobsLists`; f32[prompt_len - 1, ids listed]. num_nans_in_logits: request id -> NaN among its logits,
    if the runner counts them. sampling_errors: request id -> why no token could be
    sampled for it; it has to be finished, the others are not affected.
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]]
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists] = dataclasses.field(default_factory=dict)
    pooler_output: list[Any] | None = None
    kv_connector_output: KVConnectorOutput | None = None
    ec_connector_output: ECConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None
    cudagraph_stats: Any = None
    sampling_masks: SamplingMaskLists | None = None
    sampling_errors: dict[str, str] = dataclasses.field(default_factory=dict)
    prompt_token_id_logprobs_dict: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def sampled(self) -> np.ndarray:
        """i32[B, K], `sampled_token_ids` as an array with K >= 1 columns, NO_TOKEN behind the last one of each."""
        width = max(map(len, self.sampled_token_ids), default=0) or 1
        padded = [[*ids, *[NO_TOKEN] * (width - len(ids))] for ids in self.sampled_token_ids]
        return np.array(padded, np.int32).reshape(-1, width)

    def order(self, req_ids: list[str]) -> np.ndarray | None:
        """i64[B], where each request of the output stands in `req_ids`, which names the same; None if each stands where
        it stands there."""
        if self.req_ids == req_ids:
            return None
        place = {req_id: i for i, req_id in enumerate(req_ids)}
        return np.fromiter(map(place.__getitem__, self.req_ids), np.int64, len(self.req_ids))

    @classmethod
    def make_empty(cls) -> ModelRunnerOutput:
        """A new empty output. (vLLM shares one; a caller that changes it would change everybody's.)"""
        return cls(req_ids=[], req_id_to_index={}, sampled_token_ids=[])

    @classmethod
    def with_kv_conn_output_only(cls, kv_connector_output: KVConnectorOutput | None) -> ModelRunnerOutput:
        """The output of a step without a forward pass that carries a KV connector's report, if it has content."""
        empty = cls.make_empty()
        if kv_connector_output is not None and not kv_connector_output.is_empty():
            empty.kv_connector_output = kv_connector_output
        return empty

    @classmethod
    def with_ec_conn_output_only(cls, ec_connector_output: ECConnectorOutput | None) -> ModelRunnerOutput:
        """The output of a step without a forward pass that carries an encoder-cache connector's report."""
        return cls.make_empty().with_ec_conn_output(ec_connector_output)

    def with_ec_conn_output(self, ec_connector_output: ECConnectorOutput | None) -> ModelRunnerOutput:
        """This output, or a copy that carries the report. Use the returned value."""
        if ec_connector_output is None:
            return self
        return dataclasses.replace(self, ec_connector_output=ec_connector_output)


def make_empty_encoder_model_runner_output(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """The output of an encoder-only step: every scheduled request, no tokens, no pooled vectors."""
    req_ids = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[[] for _ in req_ids],
        pooler_output=[None] * len(req_ids),
    )


class AsyncModelRunnerOutput(Protocol):
    """A result still on its way from the device."""

    def get_output(self) -> ModelRunnerOutput:
        """Wait for it. Later calls return the same object."""
        ...
