"""What a runner refuses, before anything of its state has changed: each error names the field and the request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from jaxrunner.contract import NewRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.records import check_token_ids

NOT_BUILT_STEP_FIELDS = {
    "scheduled_spec_decode_tokens": "speculative decoding",
    "scheduled_encoder_inputs": "multimodal inputs",
    "free_encoder_mm_hashes": "multimodal inputs",
    "num_invalid_spec_tokens": "speculative decoding",
    "num_spec_tokens_to_schedule": "speculative decoding",
    "kv_connector_metadata": "KV connectors",
    "ec_connector_metadata": "encoder-cache connectors",
    "ec_manager_metadata": "encoder-cache managers",
    "partial_tail_offloads": "recurrent-state offloading",
}
NOT_BUILT_REQUEST_FIELDS = {
    "mm_features": "multimodal inputs",
    "pooling_params": "pooling",
    "lora_request": "LoRA adapters",
    "prompt_embeds": "prompt embeddings",
    "prompt_is_token_ids": "prompt embeddings",
}
STEP_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "scheduled_new_reqs": (list, tuple),
    "num_scheduled_tokens": (dict,),
    "finished_req_ids": (set, frozenset),
    "preempted_req_ids": (set, frozenset, type(None)),
    "new_block_ids_to_zero": (list, tuple, type(None)),
    "kv_cache_block_copies": (list, tuple, type(None)),
}


def check_scheduler_output(so: SchedulerOutput, known: Mapping[str, int], *, plain_total: int | None = None) -> None:
    """Raises AdmissionError for a plan that contradicts itself or the runner, NotBuiltError for a field that asks for
    something this version does not have. known: rows of the requests the runner holds. plain_total: tokens of a plan
    that `PlainPlans` found plain, so that a steady step runs no Python per request here; None for any other.
    """
    _refuse_not_built(so, NOT_BUILT_STEP_FIELDS, "SchedulerOutput")
    cached = so.scheduled_cached_reqs
    _check_types(so, is_plain=plain_total is not None)
    if cached.resumed_req_ids or cached.all_token_ids:
        raise NotBuiltError(
            "CachedRequestData.resumed_req_ids/all_token_ids belong to vLLM's V1 runner; send a resumed request in "
            "scheduled_new_reqs with prefill_token_ids"
        )
    counts = so.num_scheduled_tokens
    total = sum(counts.values()) if plain_total is None else plain_total
    if total != so.total_num_scheduled_tokens:
        raise AdmissionError(f"total_num_scheduled_tokens is {so.total_num_scheduled_tokens}, the sum is {total}")
    if plain_total is not None:
        return
    gone = so.finished_req_ids | (so.preempted_req_ids or set())
    new = {r.req_id for r in so.scheduled_new_reqs}
    if len(new) != len(so.scheduled_new_reqs):
        raise AdmissionError("an id appears twice in scheduled_new_reqs")
    cached_ids = set(cached.req_ids)
    if len(cached_ids) != len(cached.req_ids):
        raise AdmissionError("an id appears twice in scheduled_cached_reqs")
    if strange := (cached_ids - known.keys()) | (cached_ids & gone):
        raise AdmissionError(f"request {min(strange)!r} is scheduled as cached but this runner does not hold it")
    if strange := counts.keys() - cached_ids - new:
        raise AdmissionError(f"request {min(strange)!r} has scheduled tokens but is neither new nor cached")
    if min(counts.values(), default=1) < 1:
        req_id = min(counts, key=counts.__getitem__)
        raise AdmissionError(f"request {req_id!r} has {counts[req_id]} scheduled tokens; leave it out instead")


def check_new_request(
    request: NewRequestData,
    *,
    vocab_size: int,
    max_model_len: int,
    num_groups: int,
    block_size: int = 1,
    num_scheduled_tokens: int = 0,
) -> None:
    """Raises AdmissionError or NotBuiltError if `request` cannot be run, or not for `num_scheduled_tokens` now.

    block_size: tokens in an allocator block.
    """
    where = f"request {request.req_id!r}"
    _refuse_not_built(request, NOT_BUILT_REQUEST_FIELDS, where)
    if request.prompt_token_ids is None:
        raise NotBuiltError(f"{where}: prompt_token_ids is None; prompts of embeddings are not built")
    if not isinstance(request.sampling_params, SamplingParams | None):
        raise AdmissionError(f"{where}: sampling_params is {request.sampling_params!r}, no SamplingParams")
    if request.prefill_token_ids is not None:
        check_token_ids(request.prompt_token_ids, vocab_size, f"prompt of {where}")
    tokens = check_token_ids(request.prefill_token_ids or request.prompt_token_ids, vocab_size, f"prompt of {where}")
    if len(tokens) > max_model_len:
        raise AdmissionError(f"{where}: {len(tokens)} tokens; max_model_len is {max_model_len}")
    prompt_len = len(request.prompt_token_ids)
    if request.prefill_token_ids:
        if len(tokens) < prompt_len:
            raise AdmissionError(f"{where}: prefill_token_ids is shorter than the prompt it must start with")
        if (tokens[:prompt_len] != np.asarray(request.prompt_token_ids)).any():
            raise AdmissionError(f"{where}: prefill_token_ids does not start with the prompt")
    if not _is_int(request.num_computed_tokens):
        raise AdmissionError(f"{where}: num_computed_tokens is {request.num_computed_tokens!r}, no integer")
    if not 0 <= request.num_computed_tokens < len(tokens):
        raise AdmissionError(
            f"{where}: num_computed_tokens is {request.num_computed_tokens} of {len(tokens)}; the last token is "
            "always run, since its logits are needed"
        )
    params = request.sampling_params
    if params is not None and params.scores_prompt and request.num_computed_tokens and len(tokens) == prompt_len:
        raise AdmissionError(
            f"{where}: prompt_logprobs need every token of the prompt to be run, and {request.num_computed_tokens} are "
            "computed already; schedule it without the prefix cache"
        )
    check_block_lists(request.req_id, request.block_ids, num_groups)
    end = request.num_computed_tokens + num_scheduled_tokens
    if end > len(tokens):
        raise AdmissionError(f"{where}: tokens up to {end} are scheduled of {len(tokens)} that are known")
    if (held := min(map(len, request.block_ids)) * block_size) < end:
        raise AdmissionError(f"{where}: tokens up to {end} are scheduled, its blocks hold {held}")


def check_block_lists(req_id: str, block_ids: Sequence[Sequence[int]], num_groups: int) -> None:
    """Raises AdmissionError unless there is one list of distinct block ids for every KV-cache group."""
    where = f"request {req_id!r}"
    if not isinstance(block_ids, list | tuple) or not all(isinstance(ids, list | tuple) for ids in block_ids):
        raise AdmissionError(f"{where}: block ids are {block_ids!r}; give one list for each KV-cache group")
    if len(block_ids) != num_groups:
        raise AdmissionError(f"{where}: {len(block_ids)} block lists for {num_groups} KV-cache groups")
    for ids in block_ids:
        if not all(map(_is_int, ids)):
            raise AdmissionError(f"{where}: its block ids {list(ids)} are not all integers")
        if len(set(ids)) != len(ids):
            raise AdmissionError(f"{where}: a block is listed twice in {list(ids)}")


def _check_types(so: SchedulerOutput, *, is_plain: bool) -> None:
    """Raises AdmissionError for a field of another type."""
    for field, types in STEP_FIELD_TYPES.items():
        if not isinstance(value := getattr(so, field), types):
            raise AdmissionError(f"SchedulerOutput.{field} is a {type(value).__name__}: {value!r}")
    cached = so.scheduled_cached_reqs
    for field in ("req_ids", "new_block_ids"):
        if not isinstance(value := getattr(cached, field, None), list):
            raise AdmissionError(f"scheduled_cached_reqs.{field} is {value!r}, no list")
    if len(cached.req_ids) != len(cached.new_block_ids):
        raise AdmissionError(
            f"scheduled_cached_reqs has {len(cached.req_ids)} req_ids and {len(cached.new_block_ids)} new_block_ids"
        )
    for request in so.scheduled_new_reqs:
        if not isinstance(request, NewRequestData):
            raise AdmissionError(f"scheduled_new_reqs holds {request!r}, no NewRequestData")
    if not is_plain:
        _check_ids("scheduled_new_reqs", [r.req_id for r in so.scheduled_new_reqs])
        _check_ids("scheduled_cached_reqs", cached.req_ids)
        _check_ids("num_scheduled_tokens", so.num_scheduled_tokens)
        counts = so.num_scheduled_tokens
        if not set(map(type, counts.values())) <= {int} and not all(map(_is_int, counts.values())):
            raise AdmissionError(f"num_scheduled_tokens holds a number of tokens that is no integer: {counts}")
    _check_ids("finished_req_ids", so.finished_req_ids)
    _check_ids("preempted_req_ids", so.preempted_req_ids or ())
    if not all(map(_is_int, so.new_block_ids_to_zero or ())):
        raise AdmissionError(f"new_block_ids_to_zero {so.new_block_ids_to_zero} are not all integers")
    for copy in so.kv_cache_block_copies or ():
        if not (_is_int(getattr(copy, "src_block_id", None)) and _is_int(getattr(copy, "dst_block_id", None))):
            raise AdmissionError(f"kv_cache_block_copies holds {copy!r}, no pair of block ids")


def _check_ids(field: str, ids: Iterable[Any]) -> None:
    if not set(map(type, ids)) <= {str}:
        raise AdmissionError(f"{field} names a request by something else than a text: {list(ids)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _refuse_not_built(holder: Any, fields: dict[str, str], where: str) -> None:
    for field, what in fields.items():
        if getattr(holder, field):
            raise NotBuiltError(f"{where}.{field} asks for {what}, which this version does not have")
