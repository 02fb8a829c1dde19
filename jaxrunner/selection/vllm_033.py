"""The choice of vLLM 0.33 between its V1 and V2 runners: V2 for every model, unless something closes a gate.

Source: vLLM 0.33.0, `config/vllm.py` (`use_v2_model_runner`, the lists of what V2 and V1 do not support).
"""

from __future__ import annotations

from jaxrunner.selection.facts import Facts
from jaxrunner.selection.policy import Answer, Policy, passing
from jaxrunner.selection.vllm_028 import triton

PARALLEL_DRAFTERS = ("dflash", "dspark")


def hisparse(facts: Facts) -> Answer:
    """Is HiSparse configured, which only V2 has?"""
    if not facts.use_hisparse:
        return passing("no")
    return Answer("yes", "device", forced=True)


def watermark(facts: Facts) -> Answer:
    """Is a watermark configured, which only V2 has?"""
    if not facts.use_watermark:
        return passing("no")
    overruled = ", and it overrules VLLM_USE_V2_MODEL_RUNNER=0" if facts.override == "host" else ""
    return Answer(f"yes{overruled}", "device", forced=True)


def environment(facts: Facts) -> Answer:
    """Is VLLM_USE_V2_MODEL_RUNNER set?"""
    if facts.override is None:
        return passing("unset: the policy decides")
    return Answer("set, and nothing else is asked", facts.override, forced=facts.override == "device")


def gates(facts: Facts) -> Answer:
    """Is anything asked for that V2 does not support yet?"""
    if closed := unsupported_by_v2(facts):
        return Answer(", ".join(closed), "host", warned=True)
    return Answer("no: every model is V2's, whether dense, mixture of experts, hybrid or attention-free", "device")


def unsupported_by_v2(facts: Facts) -> list[str]:
    """What V2 at 0.33 falls back for, or raises if it was forced."""
    found = {
        "external_launcher with pipeline parallelism": (
            facts.distributed_executor_backend == "external_launcher" and facts.pipeline_parallel_size > 1
        ),
        f"speculative method {facts.spec_method}": facts.spec_method in ("suffix", "custom_class"),
        "parallel drafting": facts.parallel_drafting and facts.spec_method not in PARALLEL_DRAFTERS,
        "a draft model with another vocabulary": facts.draft_heterogeneous_vocab,
    }
    return [what for what, applies in found.items() if applies] + _overlap(facts)


def _overlap(facts: Facts) -> list[str]:
    """Dual-batch overlap: never by policy; where V2 is asked for by the environment, only with few other things."""
    if not facts.enable_dbo:
        return []
    if facts.override != "device":
        return ["dual-batch overlap"]
    with_it = {
        "LoRA": facts.enable_lora,
        "speculative decoding": facts.spec_method is not None,
        "pipeline parallelism": facts.pipeline_parallel_size > 1,
        "context parallelism": facts.decode_context_parallel_size > 1 or facts.prefill_context_parallel_size > 1,
        "multimodal or encoder-decoder models": facts.is_multimodal or facts.is_encoder_decoder,
        "hybrid models": facts.is_hybrid,
        "PIECEWISE CUDA graphs": facts.cudagraph_mode == "PIECEWISE",
        "encoder-only models": facts.is_encoder_only,
    }
    return [f"dual-batch overlap with {what}" for what, applies in with_it.items() if applies]


def unsupported_by_v1(facts: Facts) -> list[str]:
    """What V1 at 0.33 raises for."""
    found = {
        "prefill context parallelism": facts.prefill_context_parallel_size > 1,
        "pipeline parallelism with async scheduling": (
            facts.pipeline_parallel_size > 1 and facts.async_scheduling is True
        ),
        "dspark": facts.spec_method == "dspark",
        "XPress": facts.use_xpress,
        "adaptive verification": facts.enable_adaptive_verification,
        "quantisation of the draft model's lm_head": facts.draft_lm_head_quantization,
        "ParseAuxMTP": facts.use_parse_aux_mtp,
        "a DFlash draft model that mixes sliding and full layers": facts.has_mixed_dflash,
        "DFlash candidate heads": facts.dflash_candidate_heads,
        "diffusion models": facts.is_diffusion,
        "batch-sharded sampling": facts.use_batch_sharded_sampling,
        "Step5": any(a.startswith("Step5") for a in facts.architectures),
    }
    return [what for what, applies in found.items() if applies]


def raised_by_v2(facts: Facts) -> list[str]:
    """What V2 at 0.33 raises after the choice, outside the gates."""
    adaptive = facts.enable_adaptive_verification
    found = {
        "V2 requires Triton": not facts.has_triton,
        "HiSparse runs on V2 only, but VLLM_USE_V2_MODEL_RUNNER is 0": facts.use_hisparse and facts.override == "host",
        "adaptive verification does not run with LoRA": adaptive and facts.enable_lora,
        "adaptive verification needs full CUDA graphs": adaptive and "FULL" not in facts.cudagraph_mode,
        "adaptive verification does not run with pipeline parallelism": (adaptive and facts.pipeline_parallel_size > 1),
        "Triton's ReplaySSM runs on V1 only": facts.use_triton_replay_ssm,
    }
    return [what for what, applies in found.items() if applies]


def raised_by_v1(facts: Facts) -> list[str]:
    """What V1 at 0.33 raises after the choice."""
    found = {
        "AuxOutput runs on V2 only": facts.use_aux_output,
        "Proton attribution runs on V2 only": facts.use_proton_attribution,
    }
    return [f"V1 does not support {what}" for what in unsupported_by_v1(facts)] + [
        what for what, applies in found.items() if applies
    ]


POLICY = Policy(
    name="vllm-0.33",
    labels={"device": "V2", "host": "V1"},
    rules=(hisparse, watermark, environment, triton, gates),
    gates={"device": unsupported_by_v2},
    checks={"device": raised_by_v2, "host": raised_by_v1},
    ignored={
        "host": {"use_cascade_attention": "cascade attention was removed"},
        "device": {
            "use_cascade_attention": "cascade attention was removed",
            "enable_layerwise_nvtx_tracing": "it registers no hooks",
            "cudagraph_num_of_warmups": "it always warms up once",
            "draft_max_model_len": "it takes the target's",
        },
    },
)
