"""A GPU model runner in JAX: immutable request state, one compiled step per bucket, Pallas kernels.

Names are imported on first use, so `import jaxrunner` is quick and starts no backend.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "jaxrunner.engine.llm",
    "SamplingParams": "jaxrunner.sampling_params",
    "StructuredOutputsParams": "jaxrunner.structured_outputs",
    "RequestOutput": "jaxrunner.engine.outputs",
    "CompletionOutput": "jaxrunner.engine.outputs",
    "load": "jaxrunner.models.loading",
    "Model": "jaxrunner.models.model",
    "init_state": "jaxrunner.state.runner_state",
    "RunnerState": "jaxrunner.state.runner_state",
    "ListSizes": "jaxrunner.state.request_lists",
    "ThinkingTokens": "jaxrunner.state.sampling",
    "LogitsProcessor": "jaxrunner.sampling.custom",
    "Sampler": "jaxrunner.sampling.custom",
    "SamplingContext": "jaxrunner.sampling.custom",
    "RequestArray": "jaxrunner.state.request_arrays",
    "set_kv_scales": "jaxrunner.state.kv_scales",
    "audit": "jaxrunner.state.audit",
    "admit": "jaxrunner.manual",
    "plan": "jaxrunner.manual",
    "reserve": "jaxrunner.manual",
    "release": "jaxrunner.manual",
    "prepare_inputs": "jaxrunner.stages.prepare_inputs",
    "StepInput": "jaxrunner.stages.inputs",
    "step": "jaxrunner.stages.step",
    "decode_loop": "jaxrunner.stages.decode_loop",
    "StopReason": "jaxrunner.stages.decode_loop",
    "fork": "jaxrunner.manual",
    "fork_request": "jaxrunner.forks",
    "fork_state": "jaxrunner.forks",
    "save_state": "jaxrunner.state.saving",
    "load_state": "jaxrunner.state.saving",
    "FlightRecorder": "jaxrunner.recorder",
    "replay": "jaxrunner.recorder",
    "Logprob": "jaxrunner.engine.outputs",
    "StepOutput": "jaxrunner.stages.sample",
    "Bucket": "jaxrunner.compile.buckets",
    "Ladder": "jaxrunner.compile.ladder",
    "Trace": "jaxrunner.ladder.traces",
    "compare": "jaxrunner.ladder.replay",
    "BucketTable": "jaxrunner.compile.table",
    "compiler_options": "jaxrunner.compile.options",
    "build_runner": "jaxrunner.selection.build",
    "DeviceRunner": "jaxrunner.runner.device_runner",
    "HostRunner": "jaxrunner.host_runner.runner",
    "RunnerConfig": "jaxrunner.runner.config",
    "StepTimer": "jaxrunner.timing.timer",
    "StepTimes": "jaxrunner.timing.times",
    "SchedulerOutput": "jaxrunner.contract",
    "ModelRunnerOutput": "jaxrunner.contract",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxrunner' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
