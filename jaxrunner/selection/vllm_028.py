"""The choice of vLLM 0.28 between its V1 and V2 runners.

Source: vLLM 0.28.0, `config/vllm.py` (`use_v2_model_runner`, `_get_v2_model_runner_unsupported_features`,
`DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`), and for what raises later `v1/worker/gpu/model_runner.py`,
`v1/worker/gpu/pool/pooling_runner.py` and `longcat_flash_ngram`.
"""

from __future__ import annotations

from jaxrunner.selection.facts import Facts
from jaxrunner.selection.policy import Answer, Policy, passing

ALLOW_LIST = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV4ForCausalLM",
        "GraniteMoeForCausalLM",
        "InklingForCausalLM",
        "InklingForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "LongcatFlashNgramForCausalLM",
        "Qwen2MoeForCausalLM",
    }
)
"""Mixtures of experts that V2 takes; a dense model needs no entry."""
NOT_ON_ROCM = frozenset({"DeepseekV4ForCausalLM"})
SPEC_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
PARALLEL_DRAFTERS = ("dflash", "dspark")
POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "embed&token_classify")


def environment(facts: Facts) -> Answer:
    """Is VLLM_USE_V2_MODEL_RUNNER set?"""
    if facts.override is None:
        return passing("unset: the policy decides")
    return Answer("set, and nothing else is asked", facts.override, forced=facts.override == "device")


def forced_cases(facts: Facts) -> Answer:
    """Is there anything that only V2 can do?"""
    cases = {
        f"prefill_context_parallel_size is {facts.prefill_context_parallel_size}": (
            facts.prefill_context_parallel_size > 1
        ),
        "the speculative method is dspark": facts.spec_method == "dspark",
        "the DFlash draft model mixes sliding and full layers": facts.has_mixed_dflash,
        "the draft model is a DFlash2DraftModel": "DFlash2DraftModel" in facts.draft_architectures,
        "the model is a diffusion model": facts.is_diffusion,
    }
    for case, applies in cases.items():
        if applies:
            return Answer(f"{case}; what V2 lacks then raises instead of falling back", "device", forced=True)
    return passing("no")


def default_model(facts: Facts) -> Answer:
    """Is the model one that V2 takes by default?"""
    listed = [a for a in facts.architectures if a in allow_list(facts)]
    if facts.is_hybrid and not listed:
        return Answer("hybrid, and not on the allow-list", "host")
    if facts.is_attention_free:
        return Answer("attention-free, for which the allow-list does not help", "host")
    if facts.is_moe and not listed:
        return Answer("a mixture of experts that is not on the allow-list", "host")
    return passing(f"{listed[0]} is on the allow-list" if listed else "a dense model")


def triton(facts: Facts) -> Answer:
    """Is Triton there?"""
    return passing("yes") if facts.has_triton else Answer("no", "host", warned=True)


def gates(facts: Facts) -> Answer:
    """Is anything asked for that V2 does not support yet?"""
    if closed := unsupported(facts):
        return Answer(", ".join(closed), "host", warned=True)
    return Answer("no", "device")


def allow_list(facts: Facts) -> frozenset[str]:
    return ALLOW_LIST - NOT_ON_ROCM if facts.platform == "rocm" else ALLOW_LIST


def unsupported(facts: Facts) -> list[str]:
    """What V2 at 0.28 falls back for, or raises if it was forced."""
    method, parallel = facts.spec_method, facts.pipeline_parallel_size > 1
    adaptive = facts.enable_adaptive_verification
    found = {
        "prefill context parallelism without MLA": facts.prefill_context_parallel_size > 1 and not facts.use_mla,
        "STOCK_TORCH_COMPILE": facts.compilation_mode == "STOCK_TORCH_COMPILE",
        "sequence parallelism": facts.enable_sequence_parallelism and facts.tensor_parallel_size > 1,
        "external_launcher with pipeline parallelism": (
            facts.distributed_executor_backend == "external_launcher" and parallel
        ),
        f"speculative method {method}": method is not None and method not in SPEC_METHODS,
        "parallel drafting": facts.parallel_drafting and method not in PARALLEL_DRAFTERS,
        "eagle3 with pipeline parallelism": method == "eagle3" and parallel,
        "adaptive verification with LoRA": adaptive and facts.enable_lora,
        "adaptive verification without CUDA graphs": adaptive and facts.cudagraph_mode == "NONE",
        "adaptive verification with pipeline parallelism": adaptive and parallel,
        "dual-batch overlap": facts.enable_dbo,
        "elastic expert parallelism": facts.enable_elastic_ep,
        "custom logits processors": bool(facts.logits_processors),
        "installed plug-ins of vllm.logits_processors": bool(facts.logits_processor_plugins),
        "prompt embeddings": facts.enable_prompt_embeds,
        "kv_sharing_fast_prefill": facts.kv_sharing_fast_prefill,
    }
    return [what for what, applies in found.items() if applies]


def raised_by_v2(facts: Facts) -> list[str]:
    """What V2 at 0.28 raises when it is built, outside the gates."""
    context_parallel, method = facts.prefill_context_parallel_size > 1, facts.spec_method
    found = {
        "V2 requires Triton": not facts.has_triton,
        f"pooling task {facts.pooling_task} is none of {', '.join(POOLING_TASKS)}": (
            facts.pooling_task is not None and facts.pooling_task not in POOLING_TASKS
        ),
        f"{method} does not run with pipeline parallelism": (
            method in ("eagle3", "dflash", "dspark") and facts.pipeline_parallel_size > 1
        ),
        "prefill context parallelism does not run with pipeline parallelism": (
            context_parallel and facts.pipeline_parallel_size > 1
        ),
        "prefill context parallelism does not run encoder-decoder models": (
            context_parallel and facts.is_encoder_decoder
        ),
        "prefill context parallelism does not run multimodal models": context_parallel and facts.is_multimodal,
        "prefill context parallelism does not run with LoRA": context_parallel and facts.enable_lora,
        "prefill context parallelism does not run with speculative decoding": context_parallel and method is not None,
        "prefill context parallelism with sparse MLA needs cudagraph_mode NONE": (
            context_parallel and facts.use_sparse_mla and facts.cudagraph_mode != "NONE"
        ),
        "prefill context parallelism does not run in full CUDA graphs": (
            context_parallel and not facts.use_sparse_mla and "FULL" in facts.cudagraph_mode
        ),
    }
    return [what for what, applies in found.items() if applies]


def raised_by_v1(facts: Facts) -> list[str]:
    """What V1 at 0.28 raises."""
    found = {
        "LongcatFlashNgramForCausalLM runs on V2 only": "LongcatFlashNgramForCausalLM" in facts.architectures,
        "return_sampling_mask runs on V2 only": facts.return_sampling_mask,
        "custom logits processors do not run with speculative decoding": (
            bool(facts.logits_processors) and facts.spec_method is not None
        ),
    }
    return [what for what, applies in found.items() if applies]


POLICY = Policy(
    name="vllm-0.28",
    labels={"device": "V2", "host": "V1"},
    rules=(environment, forced_cases, default_model, triton, gates),
    gates={"device": unsupported},
    checks={"device": raised_by_v2, "host": raised_by_v1},
    ignored={
        "host": {
            "rejection_sample_method": "its rejection sampler has no block branch and goes on as standard",
            "spec_logprob_token_ids": "with drafts it reads max_num_logprobs alone",
        },
        "device": {
            "spec_logprob_token_ids": "with drafts its RejectionSampler reads max_num_logprobs alone",
            "use_cascade_attention": "its common prefix is always 0",
            "cudagraph_metrics": "its output never has cudagraph_stats",
            "memory_profiler_estimate_cudagraphs": "its estimate is 0",
            "enable_layerwise_nvtx_tracing": "it registers no hooks",
            "cudagraph_num_of_warmups": "it always warms up once",
            "draft_max_model_len": "it takes the target's",
            "disable_padded_drafter_batch": "its runner does not read it, but it still turns async scheduling off",
            "kv_connector_uniform_layout": "not done yet",
        },
    },
)
