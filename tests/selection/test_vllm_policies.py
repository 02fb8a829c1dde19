"""vLLM's choices at 0.28 and 0.33, rule by rule."""

from __future__ import annotations

import dataclasses

import pytest

from jaxrunner.selection import vllm_028, vllm_033
from jaxrunner.selection.facts import Facts, facts_of
from jaxrunner.selection.policy import decide
from jaxrunner.selection.vllm_async import async_scheduling

DENSE = Facts(architectures=("LlamaForCausalLM",))
MOE = Facts(architectures=("MixtralForCausalLM",), is_moe=True)
MIXED_DFLASH = {"spec_method": "dflash", "dflash_layers": 4, "dflash_sliding_layers": 2}


def at_028(facts, **changes):
    return decide(vllm_028.POLICY, dataclasses.replace(facts, **changes))


def at_033(facts, **changes):
    return decide(vllm_033.POLICY, dataclasses.replace(facts, **changes))


def test_the_allow_list_of_028_has_eight_names_and_seven_on_rocm():
    assert len(vllm_028.allow_list(DENSE)) == 8
    rocm = vllm_028.allow_list(dataclasses.replace(DENSE, platform="rocm"))
    assert vllm_028.ALLOW_LIST - rocm == {"DeepseekV4ForCausalLM"}


@pytest.mark.parametrize(
    ("facts", "old", "new"),
    [
        ({"architectures": ("LlamaForCausalLM",)}, "V2", "V2"),
        ({"architectures": ("MixtralForCausalLM",), "is_moe": True}, "V1", "V2"),
        ({"architectures": ("Qwen3NextForCausalLM",), "is_hybrid": True}, "V1", "V2"),
        ({"architectures": ("MambaForCausalLM",), "is_attention_free": True}, "V1", "V2"),
        *[({"architectures": (name,), "is_moe": True}, "V2", "V2") for name in sorted(vllm_028.ALLOW_LIST)],
        ({"architectures": ("KimiK3ForConditionalGeneration",), "is_moe": True, "is_hybrid": True}, "V2", "V2"),
        ({"architectures": ("Qwen2MoeForCausalLM",), "is_attention_free": True}, "V1", "V2"),
        ({"architectures": ("DeepseekV4ForCausalLM",), "is_moe": True, "platform": "rocm"}, "V1", "V2"),
        ({"architectures": ("Unknown", "Qwen2MoeForCausalLM"), "is_moe": True}, "V2", "V2"),
    ],
    ids=str,
)
def test_the_model_decides_at_028_and_no_longer_at_033(facts, old, new):
    found = at_028(Facts(**facts)), at_033(Facts(**facts))
    assert [d.label for d in found] == [old, new]
    assert [d.errors for d in found] == [(), ()]
    assert not found[0].answer.warned  # neither choice is said aloud


@pytest.mark.parametrize("decided", [at_028, at_033])
def test_the_environment_outweighs_the_policy_both_ways(decided):
    assert decided(DENSE, override="host").label == "V1"
    assert decided(MOE, override="device").label == "V2"
    assert decided(DENSE, override="host", has_triton=False).errors == ()
    assert decided(DENSE, override="device", has_triton=False).errors == ("V2 requires Triton",)


@pytest.mark.parametrize("decided", [at_028, at_033])
def test_without_triton_v1_is_taken_with_a_warning(decided):
    decision = decided(DENSE, has_triton=False)
    assert (decision.label, decision.answer.warned) == ("V1", True)


FORCED_028 = {
    "context parallelism": {"prefill_context_parallel_size": 2, "use_mla": True, "cudagraph_mode": "PIECEWISE"},
    "dspark": {"spec_method": "dspark"},
    "mixed DFlash": MIXED_DFLASH,
    "DFlash2": {"spec_method": "dflash", "draft_architectures": ("DFlash2DraftModel",)},
    "diffusion": {"is_diffusion": True},
}


@pytest.mark.parametrize("case", FORCED_028.values(), ids=FORCED_028)
def test_cases_that_only_v2_takes_at_028_are_forced_past_model_and_triton(case):
    decision = at_028(MOE, **case)
    assert (decision.label, decision.answer.forced, decision.errors) == ("V2", True, ())
    without = at_028(MOE, has_triton=False, **case)
    assert (without.label, without.errors) == ("V2", ("V2 requires Triton",))
    with_gate = at_028(MOE, enable_prompt_embeds=True, **case)
    assert with_gate.label == "V2"
    assert with_gate.errors == ("V2 does not support prompt embeddings",)  # raised, where a policy would fall back
    assert at_028(MOE, override="host", **case).label == "V1"  # the environment is asked first


@pytest.mark.parametrize(("sliding", "label"), [(0, "V1"), (2, "V2"), (4, "V1")])
def test_dflash_is_forced_only_if_its_layers_are_mixed(sliding, label):
    assert at_028(MOE, spec_method="dflash", dflash_layers=4, dflash_sliding_layers=sliding).label == label


GATES_028 = {
    "stock compile": {"compilation_mode": "STOCK_TORCH_COMPILE"},
    "sequence parallelism": {"enable_sequence_parallelism": True, "tensor_parallel_size": 2},
    "external launcher": {"distributed_executor_backend": "external_launcher", "pipeline_parallel_size": 2},
    **{m: {"spec_method": m} for m in ("ngram", "ngram_gpu", "draft_model", "medusa", "suffix", "mlp_speculator")},
    "parallel drafting": {"spec_method": "eagle", "parallel_drafting": True},
    "eagle3 + PP": {"spec_method": "eagle3", "pipeline_parallel_size": 2},
    "adaptive + LoRA": {"enable_adaptive_verification": True, "enable_lora": True},
    "adaptive + eager": {"enable_adaptive_verification": True, "cudagraph_mode": "NONE"},
    "adaptive + PP": {"enable_adaptive_verification": True, "pipeline_parallel_size": 2},
    "DBO": {"enable_dbo": True},
    "elastic EP": {"enable_elastic_ep": True},
    "processors": {"logits_processors": ("my.Processor",)},
    "plug-ins": {"logits_processor_plugins": ("installed",)},
    "prompt embeddings": {"enable_prompt_embeds": True},
    "fast prefill": {"kv_sharing_fast_prefill": True},
}


@pytest.mark.parametrize("case", GATES_028.values(), ids=GATES_028)
def test_each_gate_of_028_falls_back_with_a_warning_and_raises_where_v2_is_asked_for(case):
    decision = at_028(DENSE, **case)
    assert (decision.label, decision.answer.warned, decision.errors) == ("V1", True, ())
    asked = at_028(DENSE, override="device", **case)
    assert asked.label == "V2"
    assert asked.errors[0].startswith("V2 does not support ")


@pytest.mark.parametrize(
    "case",
    [
        {"enable_sequence_parallelism": True},
        {"distributed_executor_backend": "external_launcher"},
        *[{"spec_method": m} for m in ("eagle", "eagle3", "mtp", "dflash", "dspark")],
        *[{"spec_method": m, "parallel_drafting": True} for m in ("dflash", "dspark")],
        {"enable_adaptive_verification": True},
    ],
    ids=str,
)
def test_gates_of_028_stay_open_beside_what_closes_them(case):
    decision = at_028(DENSE, **case)
    assert (decision.label, decision.errors) == ("V2", ())


def test_context_parallelism_without_mla_is_forced_and_raises_at_028():
    decision = at_028(DENSE, prefill_context_parallel_size=2, cudagraph_mode="NONE")
    assert decision.errors == ("V2 does not support prefill context parallelism without MLA",)


PCP = {"prefill_context_parallel_size": 2, "use_mla": True, "cudagraph_mode": "NONE"}
RAISED_028 = {
    "pooling task": ({"pooling_task": "score"}, "pooling task score"),
    "dflash + PP": ({"spec_method": "dflash", "pipeline_parallel_size": 2}, "dflash does not run with pipeline"),
    "dspark + PP": ({"spec_method": "dspark", "pipeline_parallel_size": 2}, "dspark does not run with pipeline"),
    "PCP + PP": ({**PCP, "pipeline_parallel_size": 2}, "pipeline parallelism"),
    "PCP + encoder-decoder": ({**PCP, "is_encoder_decoder": True}, "encoder-decoder"),
    "PCP + multimodal": ({**PCP, "is_multimodal": True}, "multimodal"),
    "PCP + LoRA": ({**PCP, "enable_lora": True}, "LoRA"),
    "PCP + drafts": ({**PCP, "spec_method": "mtp"}, "speculative decoding"),
    "PCP + sparse MLA": ({**PCP, "use_sparse_mla": True, "cudagraph_mode": "PIECEWISE"}, "needs cudagraph_mode NONE"),
    "PCP + full graphs": ({**PCP, "cudagraph_mode": "FULL_AND_PIECEWISE"}, "full CUDA graphs"),
}


@pytest.mark.parametrize(("case", "message"), RAISED_028.values(), ids=RAISED_028)
def test_v2_of_028_raises_after_the_choice(case, message):
    decision = at_028(DENSE, **case)
    assert decision.label == "V2"
    assert len(decision.errors) == 1
    assert message in decision.errors[0]


@pytest.mark.parametrize("task", vllm_028.POOLING_TASKS)
def test_pooling_tasks_that_v2_takes_at_028(task):
    assert at_028(DENSE, pooling_task=task).errors == ()


def test_v1_of_028_raises_for_what_it_lacks():
    longcat = Facts(architectures=("LongcatFlashNgramForCausalLM",), is_moe=True)
    assert "V2 only" in at_028(longcat, override="host").errors[0]
    assert "return_sampling_mask" in at_028(MOE, return_sampling_mask=True).errors[0]
    both = at_028(DENSE, logits_processors=("p",), spec_method="eagle")
    assert (both.label, len(both.errors)) == ("V1", 1)


def test_hisparse_is_forced_at_033_and_raises_where_v1_is_asked_for():
    assert at_033(DENSE, use_hisparse=True, has_triton=False).label == "V2"
    assert "VLLM_USE_V2_MODEL_RUNNER is 0" in at_033(DENSE, use_hisparse=True, override="host").errors[0]


def test_a_watermark_overrules_the_environment_at_033():
    decision = at_033(DENSE, use_watermark=True, override="host")
    assert (decision.label, decision.errors) == ("V2", ())
    assert "overrules" in decision.answer.why


GATES_033 = {
    "external launcher": GATES_028["external launcher"],
    "suffix": {"spec_method": "suffix"},
    "custom_class": {"spec_method": "custom_class"},
    "parallel drafting": GATES_028["parallel drafting"],
    "vocabulary": {"draft_heterogeneous_vocab": True},
}


@pytest.mark.parametrize("case", GATES_033.values(), ids=GATES_033)
def test_each_gate_of_033_falls_back_with_a_warning_and_raises_where_v2_is_asked_for(case):
    decision = at_033(DENSE, **case)
    assert (decision.label, decision.answer.warned) == ("V1", True)
    assert at_033(DENSE, override="device", **case).errors


STILL_THERE_033 = ("external launcher", "suffix", "parallel drafting", "DBO")
NOT_ON_V2_033 = ("medusa", "mlp_speculator", "adaptive + LoRA", "adaptive + eager", "adaptive + PP")


@pytest.mark.parametrize("name", [name for name in GATES_028 if name not in STILL_THERE_033 + NOT_ON_V2_033])
def test_gates_of_028_that_033_has_removed(name):
    assert at_028(DENSE, **GATES_028[name]).label == "V1"
    decision = at_033(DENSE, **GATES_028[name])
    assert (decision.label, decision.errors) == ("V2", ())


OVERLAP = {
    "LoRA": {"enable_lora": True},
    "drafts": {"spec_method": "eagle"},
    "PP": {"pipeline_parallel_size": 2},
    "DCP": {"decode_context_parallel_size": 2},
    "PCP": {"prefill_context_parallel_size": 2},
    "multimodal": {"is_multimodal": True},
    "encoder-decoder": {"is_encoder_decoder": True},
    "hybrid": {"is_hybrid": True},
    "PIECEWISE": {"cudagraph_mode": "PIECEWISE"},
    "encoder-only": {"is_encoder_only": True},
}


def test_dual_batch_overlap_is_v1_by_policy_and_v2_where_asked_for():
    assert at_033(DENSE, enable_dbo=True).label == "V1"
    asked = at_033(DENSE, enable_dbo=True, override="device")
    assert (asked.label, asked.errors) == ("V2", ())


@pytest.mark.parametrize("case", OVERLAP.values(), ids=OVERLAP)
def test_dual_batch_overlap_on_v2_goes_with_few_things(case):
    decision = at_033(DENSE, enable_dbo=True, override="device", **case)
    assert len(decision.errors) == 1
    assert "dual-batch overlap with" in decision.errors[0]


V1_LACKS_033 = {
    "PCP": {"prefill_context_parallel_size": 2},
    "PP + async": {"pipeline_parallel_size": 2, "async_scheduling": True},
    "dspark": {"spec_method": "dspark"},
    "XPress": {"use_xpress": True},
    "adaptive": {"enable_adaptive_verification": True},
    "lm_head": {"draft_lm_head_quantization": True},
    "ParseAuxMTP": {"use_parse_aux_mtp": True},
    "mixed DFlash": MIXED_DFLASH,
    "candidate heads": {"dflash_candidate_heads": True},
    "diffusion": {"is_diffusion": True},
    "batch-sharded sampling": {"use_batch_sharded_sampling": True},
    "Step5": {"architectures": ("Step5ForCausalLM",)},
    "AuxOutput": {"use_aux_output": True},
    "Proton": {"use_proton_attribution": True},
}


@pytest.mark.parametrize("case", V1_LACKS_033.values(), ids=V1_LACKS_033)
@pytest.mark.parametrize("way", [{"override": "host"}, {"has_triton": False}], ids=["asked for", "fallen back to"])
def test_v1_of_033_raises_for_what_it_lacks(case, way):
    decision = at_033(DENSE, **case, **way)
    assert decision.label == "V1"
    assert len(decision.errors) == 1
    assert at_033(DENSE, **case).errors == ()


@pytest.mark.parametrize(
    "case", [{"enable_lora": True}, {"cudagraph_mode": "PIECEWISE"}, {"pipeline_parallel_size": 2}], ids=str
)
def test_adaptive_verification_at_033_is_checked_on_v2(case):
    decision = at_033(DENSE, enable_adaptive_verification=True, **case)
    assert decision.label == "V2"
    assert len(decision.errors) == 1


def test_tritons_replay_ssm_needs_v1_at_033():
    assert at_033(DENSE, use_triton_replay_ssm=True).errors == ("Triton's ReplaySSM runs on V1 only",)
    assert at_033(DENSE, use_triton_replay_ssm=True, override="host").errors == ()


@pytest.mark.parametrize(
    ("facts", "release", "runner", "enabled", "warned"),
    [
        ({}, "0.28", "device", True, False),
        ({"async_scheduling": False}, "0.28", "device", False, False),
        ({"pooling_task": "embed"}, "0.28", "device", False, False),
        ({"spec_method": "eagle"}, "0.28", "device", True, False),
        ({"spec_method": "dspark"}, "0.28", "device", True, False),
        ({"spec_method": "ngram"}, "0.28", "host", False, True),
        ({"spec_method": "ngram", "async_scheduling": True}, "0.28", "host", None, False),
        ({"spec_method": "ngram", "async_scheduling": True}, "0.33", "device", True, False),
        ({"spec_method": "ngram"}, "0.33", "host", False, True),
        ({"disable_padded_drafter_batch": True}, "0.28", "device", False, True),
        ({"disable_padded_drafter_batch": True, "async_scheduling": True}, "0.28", "device", None, False),
        ({"disable_padded_drafter_batch": True}, "0.33", "device", True, False),
        ({"executor_supports_async": False}, "0.28", "device", False, True),
        ({"executor_supports_async": False, "async_scheduling": True}, "0.33", "device", None, False),
        ({"pipeline_parallel_size": 2}, "0.28", "host", True, False),
        ({"pipeline_parallel_size": 2}, "0.33", "host", False, True),
        ({"pipeline_parallel_size": 2}, "0.33", "device", True, False),
    ],
    ids=str,
)
def test_async_scheduling(facts, release, runner, enabled, warned):
    choice = async_scheduling(Facts(**facts), release, runner)
    assert (choice.enabled, choice.warned) == (enabled, warned)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 8}, {}),
        ({"num_attention_heads": 8, "num_local_experts": 8}, {"is_moe": True}),
        ({"num_attention_heads": 8, "num_experts": 0}, {}),
        ({"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]}, {"is_hybrid": True}),
        ({"num_attention_heads": 8, "layer_types": ["sliding_attention", "full_attention"]}, {}),
        ({"state_size": 16}, {"is_attention_free": True}),
        ({"num_attention_heads": 8, "layer_types": ["mamba", "mamba"]}, {"is_attention_free": True}),
        ({"num_attention_heads": 8, "kv_lora_rank": 512}, {"use_mla": True}),
        ({"num_attention_heads": 8, "kv_lora_rank": 8, "index_topk": 8}, {"use_mla": True, "use_sparse_mla": True}),
        ({"text_config": {"num_attention_heads": 8, "n_routed_experts": 4}, "vision_config": {"depth": 1}},
         {"is_moe": True, "is_multimodal": True}),
        ({"num_attention_heads": 8, "is_encoder_decoder": True}, {"is_encoder_decoder": True}),
    ],
    ids=str,
)  # fmt: skip
def test_facts_of_a_configuration(config, expected):
    assert facts_of({"architectures": ["X"], **config}) == Facts(architectures=("X",), **expected)
    assert facts_of(config, is_moe=False).is_moe is False
