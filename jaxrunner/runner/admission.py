"""What a runner refuses, before anything of its state has changed: each error names the field and the request."""

from __future__ import annotations

from typing import Any

from jaxrunner.contract import NewRequestData, SchedulerOutput
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.state.records import check_token_ids

NOT_BUILT_STEP_FIELDS = {
    "scheduled_spec_decode_tokens": "speculative decoding",
    "scheduled_encoder_inputs": "multimodal inputs",
    "free_encoder_mm_hashes": "multimodal inputs",
    "has_structured_output_requests": "structured output",
    "pending_structured_output_tokens": "structured output",
    "num_invalid_spec_tokens": "speculative decoding",
    "num_spec_tokens_to_schedule": "speculative decoding",
    "kv_connector_metadata": "KV connectors",
    "ec_connector_metadata": "encoder-cache connectors",
    "ec_manager_metadata": "encoder-cache managers",
    "new_block_ids_to_zero": "zeroing of new blocks",
    "kv_cache_block_copies": "copy-on-write of blocks",
    "partial_tail_offloads": "recurrent-state offloading",
}
NOT_BUILT_REQUEST_FIELDS = {
    "mm_features": "multimodal inputs",
    "pooling_params": "pooling",
    "lora_request": "LoRA adapters",
    "prompt_embeds": "prompt embeddings",
    "prompt_is_token_ids": "prompt embeddings",
}


def check_scheduler_output(so: SchedulerOutput, known: Any) -> None:
    """Raises AdmissionError for a plan that contradicts itself or the runner, NotBuiltError for a field that asks for
    something this version does not have. known: container of the ids the runner holds.
    """
    _refuse_not_built(so, NOT_BUILT_STEP_FIELDS, "SchedulerOutput")
    cached = so.scheduled_cached_reqs
    if cached.resumed_req_ids or cached.all_token_ids:
        raise NotBuiltError(
            "CachedRequestData.resumed_req_ids/all_token_ids belong to vLLM's V1 runner; send a resumed request in "
            "scheduled_new_reqs with prefill_token_ids"
        )
    total = sum(so.num_scheduled_tokens.values())
    if total != so.total_num_scheduled_tokens:
        raise AdmissionError(f"total_num_scheduled_tokens is {so.total_num_scheduled_tokens}, the sum is {total}")
    gone = so.finished_req_ids | (so.preempted_req_ids or set())
    new = {r.req_id for r in so.scheduled_new_reqs}
    if len(new) != len(so.scheduled_new_reqs):
        raise AdmissionError("an id appears twice in scheduled_new_reqs")
    for req_id in cached.req_ids:
        if req_id not in known or req_id in gone:
            raise AdmissionError(f"request {req_id!r} is scheduled as cached but this runner does not hold it")
    live = new | set(cached.req_ids)
    for req_id, count in so.num_scheduled_tokens.items():
        if req_id not in live:
            raise AdmissionError(f"request {req_id!r} has scheduled tokens but is neither new nor cached")
        if count < 1:
            raise AdmissionError(f"request {req_id!r} has {count} scheduled tokens; leave it out instead")


def check_new_request(request: NewRequestData, *, vocab_size: int, max_model_len: int, num_groups: int) -> None:
    """Raises AdmissionError or NotBuiltError if `request` cannot be run."""
    where = f"request {request.req_id!r}"
    _refuse_not_built(request, NOT_BUILT_REQUEST_FIELDS, where)
    if request.prompt_token_ids is None:
        raise NotBuiltError(f"{where}: prompt_token_ids is None; prompts of embeddings are not built")
    tokens = check_token_ids(request.prefill_token_ids or request.prompt_token_ids, vocab_size, f"prompt of {where}")
    if len(tokens) > max_model_len:
        raise AdmissionError(f"{where}: {len(tokens)} tokens; max_model_len is {max_model_len}")
    if len(tokens) < len(request.prompt_token_ids):
        raise AdmissionError(f"{where}: prefill_token_ids is shorter than the prompt it must start with")
    if not 0 <= request.num_computed_tokens < len(tokens):
        raise AdmissionError(
            f"{where}: num_computed_tokens is {request.num_computed_tokens} of {len(tokens)}; the last token is "
            "always run, since its logits are needed"
        )
    if len(request.block_ids) != num_groups:
        raise AdmissionError(f"{where}: {len(request.block_ids)} block lists for {num_groups} KV-cache groups")


def _refuse_not_built(holder: Any, fields: dict[str, str], where: str) -> None:
    for field, what in fields.items():
        if getattr(holder, field):
            raise NotBuiltError(f"{where}.{field} asks for {what}, which this version does not have")
