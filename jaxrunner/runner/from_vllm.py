"""From a real vLLM `SchedulerOutput` (or one recorded from it) to this package's, by attribute names alone.

vLLM is not imported. A recorded plan can so be replayed and every index array compared.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrunner.contract import CachedRequestData, NewRequestData, SchedulerOutput
from jaxrunner.errors import NotBuiltError
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.structured_outputs import StructuredOutputsParams

KNOWN_NEWER_FIELDS = {
    "encoder_input_updates": "multimodal inputs",
    "has_sync_kv_loads": "KV connectors",
    "aux_output_connector_metadata": "auxiliary outputs",
}
"""Fields of newer releases that change what a step must do; refused unless empty."""


def scheduler_output_from_vllm(source: Any) -> SchedulerOutput:
    """The same plan. source: any object with vLLM's attributes (0.28 or 0.33); missing ones take their defaults.

    Raises NotBuiltError for a sampling parameter or a field that asks for something this version does not have.
    """
    for field, what in KNOWN_NEWER_FIELDS.items():
        if getattr(source, field, None):
            raise NotBuiltError(f"SchedulerOutput.{field} asks for {what}, which this version does not have")
    values = _copy(source, SchedulerOutput)
    values["scheduled_new_reqs"] = [_new_request(r) for r in source.scheduled_new_reqs]
    values["scheduled_cached_reqs"] = CachedRequestData(**_copy(source.scheduled_cached_reqs, CachedRequestData))
    values["num_scheduled_tokens"] = {str(k): int(v) for k, v in source.num_scheduled_tokens.items()}
    return SchedulerOutput(**values)


NOT_BUILT_PARAMS = ("logits_processors",)
"""Parameters of vLLM's class that change the sampled tokens or the output and have no counterpart here."""


def sampling_params_from_vllm(source: Any) -> SamplingParams:
    """The same parameters. What vLLM's engine acts on outside of the runner (detokenisation, output kind) is left out.

    Raises NotBuiltError for one that asks for something this version does not have.
    """
    for name in NOT_BUILT_PARAMS:
        if getattr(source, name, None):
            raise NotBuiltError(f"SamplingParams.{name} is not built yet")
    names = [f.name for f in dataclasses.fields(SamplingParams) if hasattr(source, f.name)]
    values = {name: getattr(source, name) for name in names}
    values["stop_token_ids"] = tuple(values.get("stop_token_ids") or ())
    values["structured_outputs"] = _structured_outputs(values.get("structured_outputs"))
    return SamplingParams(**values)


def _structured_outputs(source: Any) -> StructuredOutputsParams | None:
    if source is None:
        return None
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(source, name, None):
            raise NotBuiltError(f"structured_outputs.{name} is not built yet")
    return StructuredOutputsParams(**_copy(source, StructuredOutputsParams))


def _new_request(source: Any) -> NewRequestData:
    values = _copy(source, NewRequestData)
    if values.get("sampling_params") is not None:
        values["sampling_params"] = sampling_params_from_vllm(source.sampling_params)
    values["block_ids"] = tuple(list(ids) for ids in source.block_ids)
    return NewRequestData(**values)


def _copy(source: Any, target: type) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(target)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}
