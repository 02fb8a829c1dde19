"""`Facts`: what the rules of a policy may ask about a model and its configuration, with vLLM's field names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

RunnerName = Literal["device", "host"]
RUNNER_NAMES: tuple[RunnerName, ...] = ("device", "host")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields of a Hugging Face configuration that count the experts of a layer."""
RECURRENT_LAYERS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
"""Values of `layer_types` for layers that keep a recurrent state in place of keys and values."""
RECURRENT_SIZES = ("state_size", "mamba_d_state", "linear_num_value_heads", "ssm_cfg")
"""Fields that only a model with such layers has."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """override: the runner that is asked for; None leaves it to the policy. override_from: who asks.

    "device" stands for the design that keeps requests on the device (this package's DeviceRunner, vLLM's V2), "host"
    for the one that keeps dense rows on the host (HostRunner, vLLM's V1). platform: "cuda", "rocm", "tpu", "cpu".
    spec_method: of speculative decoding, vLLM's name. dflash_layers, dflash_sliding_layers: layers of a DFlash draft
    model, and how many of them have a sliding window. logits_processor_plugins: installed entry points of the group
    vllm.logits_processors. spec_logprob_token_ids: requests with drafts ask for log-probabilities of given ids. The
    others are named after the feature or the option of vLLM that they say is used.
    """

    override: RunnerName | None = None
    override_from: str = ""
    architectures: tuple[str, ...] = ()
    platform: str = "cuda"
    has_triton: bool = True
    # the model
    is_moe: bool = False
    is_hybrid: bool = False
    is_attention_free: bool = False
    is_diffusion: bool = False
    is_multimodal: bool = False
    is_encoder_decoder: bool = False
    is_encoder_only: bool = False
    use_mla: bool = False
    use_sparse_mla: bool = False
    # parallelism
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    executor_supports_async: bool = True
    enable_sequence_parallelism: bool = False
    enable_dbo: bool = False
    enable_elastic_ep: bool = False
    # compilation
    compilation_mode: str = "VLLM_COMPILE"
    cudagraph_mode: str = "FULL_AND_PIECEWISE"
    # speculative decoding
    spec_method: str | None = None
    draft_architectures: tuple[str, ...] = ()
    dflash_layers: int = 0
    dflash_sliding_layers: int = 0
    dflash_candidate_heads: bool = False
    parallel_drafting: bool = False
    enable_adaptive_verification: bool = False
    draft_heterogeneous_vocab: bool = False
    draft_lm_head_quantization: bool = False
    use_xpress: bool = False
    use_parse_aux_mtp: bool = False
    disable_padded_drafter_batch: bool = False
    rejection_sample_method: str = "standard"
    draft_max_model_len: int | None = None
    # requests
    pooling_task: str | None = None
    enable_prompt_embeds: bool = False
    logits_processors: tuple[str, ...] = ()
    logits_processor_plugins: tuple[str, ...] = ()
    return_sampling_mask: bool = False
    spec_logprob_token_ids: bool = False
    # the rest
    enable_lora: bool = False
    async_scheduling: bool | None = None
    kv_sharing_fast_prefill: bool = False
    use_hisparse: bool = False
    use_watermark: bool = False
    use_batch_sharded_sampling: bool = False
    use_aux_output: bool = False
    use_proton_attribution: bool = False
    use_triton_replay_ssm: bool = False
    use_cascade_attention: bool = False
    cudagraph_metrics: bool = False
    cudagraph_num_of_warmups: int = 0
    memory_profiler_estimate_cudagraphs: bool = False
    enable_layerwise_nvtx_tracing: bool = False
    kv_connector_uniform_layout: bool = False

    @property
    def has_mixed_dflash(self) -> bool:
        """A DFlash draft model of which some layers, but not all, have a sliding window."""
        return self.spec_method == "dflash" and 0 < self.dflash_sliding_layers < self.dflash_layers


def facts_of(config: Mapping[str, Any], **known: Any) -> Facts:
    """The facts that a Hugging Face configuration tells, and those already known, which win.

    A multimodal configuration keeps its language model in `text_config`. vLLM asks the class of the model whether it is
    hybrid or attention-free; here the kinds of its layers say so.
    """
    text = {**config, **(config.get("text_config") or {})}
    kinds = [str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()]
    recurrent = any(kind in RECURRENT_LAYERS for kind in kinds) or any(text.get(name) for name in RECURRENT_SIZES)
    has_attention = bool(text.get("num_attention_heads")) and not (
        kinds and all(kind in RECURRENT_LAYERS for kind in kinds)
    )
    told: dict[str, Any] = {
        "architectures": tuple(config.get("architectures") or ()),
        "is_moe": any((text.get(name) or 0) > 0 for name in EXPERT_COUNTS),
        "is_hybrid": recurrent and has_attention,
        "is_attention_free": recurrent and not has_attention,
        "is_multimodal": bool(config.get("vision_config") or config.get("audio_config")),
        "is_encoder_decoder": bool(config.get("is_encoder_decoder")),
        "use_mla": bool(text.get("kv_lora_rank")),
        "use_sparse_mla": bool(text.get("kv_lora_rank") and text.get("index_topk")),
    }
    return Facts(**{**told, **known})
