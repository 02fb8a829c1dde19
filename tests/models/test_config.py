import copy

import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.config import model_from_config
from jaxrunner.models.model import LayerSpec, RopeSpec

from .checkpoints import TINY, config_of, error_message

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def family(name, **changes):
    return LLAMA | {"architectures": [f"{name}ForCausalLM"]} | changes


def windows(config):
    return [layer.window for layer in model_from_config(config).layers]


@pytest.mark.parametrize("name", TINY)
def test_both_schemas_give_the_same_model(name):
    new, old = config_of(name), config_of(name, "config.v4.json")
    model = model_from_config(new)
    assert model == model_from_config(old)
    assert hash(model) == hash(model_from_config(old))
    assert model.head_dim == new.get("head_dim", 16)
    assert model.rope.theta == new["rope_parameters"]["rope_theta"]


def test_what_the_families_differ_in():
    models = {name: model_from_config(config_of(name)) for name in TINY}
    flags = {n: (m.qkv_bias, m.o_bias, m.mlp_bias, m.qk_norm, m.tie_word_embeddings) for n, m in models.items()}
    plain = (False, False, False, False, False)
    assert flags == {
        "llama": plain,
        "llama_bias_tied_headdim": (True, True, True, False, True),
        "llama_rope_llama3": plain,
        "llama_rope_yarn": plain,
        "mistral": plain,
        "qwen2": (True, False, False, False, False),
        "qwen3": (False, False, False, True, False),
        "smollm3": plain,
    }
    assert models["mistral"].layers == (LayerSpec(16),) * 3
    assert [layer.rope for layer in models["smollm3"].layers] == [True, False, True, False]


def test_qwen3_attention_bias_is_on_all_four_projections():
    model = model_from_config(family("Qwen3", head_dim=32, attention_bias=True))
    assert (model.qkv_bias, model.o_bias, model.mlp_bias) == (True, True, False)


def test_sliding_windows_per_layer():
    on = {"sliding_window": 16, "use_sliding_window": True}
    assert windows(family("Qwen2", **on, max_window_layers=1)) == [None, 16, 16]
    assert windows(family("Qwen2", **on | {"use_sliding_window": False}, max_window_layers=1)) == [None] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(family("Qwen3", **on, head_dim=16, layer_types=types)) == [16, None, 16]
    assert windows(family("Qwen3", **on | {"use_sliding_window": False}, layer_types=types)) == [None] * 3
    assert windows(family("Llama", sliding_window=16)) == [None] * 3
    assert windows(family("Llama", sliding_window=16, layer_types=types)) == [16, None, 16]
    assert windows(family("Mistral", sliding_window=None)) == [None] * 3
    assert windows(family("Mistral")) == [4096] * 3
    assert windows(family("SmolLM3", **on, no_rope_layers=[1, 0, 1])) == [None, 16, None]


def test_smollm3_default_leaves_every_fourth_layer_unrotated():
    model = model_from_config(family("SmolLM3", num_hidden_layers=8))
    assert [layer.rope for layer in model.layers] == [True, True, True, False] * 2


def test_k095_explicit_head_dim_and_null():
    base = LLAMA | {"hidden_size": 80, "num_attention_heads": 8}
    assert model_from_config(base | {"head_dim": 16}).head_dim == 16
    assert model_from_config(base | {"head_dim": None}).head_dim == 10
    assert model_from_config(base).head_dim == 10


def test_k096_hidden_size_need_not_be_divisible_when_head_dim_is_given():
    base = LLAMA | {"hidden_size": 100, "num_attention_heads": 12, "num_key_value_heads": 4}
    model = model_from_config(base | {"head_dim": 16})
    assert (model.num_heads * model.head_dim, model.hidden_size) == (192, 100)
    with pytest.raises(CheckpointError) as info:
        model_from_config(base)
    error_message(info, "hidden_size 100", "num_attention_heads 12", "head_dim")


def test_k097_type_and_rope_type():
    def rope(scaling):
        return model_from_config(LLAMA | {"rope_scaling": scaling}).rope

    linear = RopeSpec(10000.0, "linear", (("factor", 8.0),))
    assert rope({"type": "linear", "factor": 8.0}) == linear
    assert rope({"rope_type": "linear", "factor": 8.0}) == linear
    assert rope({"rope_type": "linear", "type": "linear", "factor": 8.0}) == linear
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    assert rope(llama3 | {"type": "llama3"}) == rope(llama3 | {"rope_type": "llama3"})
    with pytest.raises(CheckpointError) as info:
        rope({"type": "linear", "rope_type": "yarn", "factor": 8.0})
    error_message(info, "rope_type", "linear", "yarn")


def test_k099_base_at_top_level_and_yarn_are_both_in_force():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = LLAMA | {"rope_theta": 600000, "rope_scaling": scaling}
    before = copy.deepcopy(config)
    rope = model_from_config(config).rope
    assert (rope.theta, rope.rope_type, dict(rope.parameters)["factor"]) == (600000.0, "yarn", 4.0)
    assert config == before


def test_rope_theta_twice_must_agree():
    nested = {"rope_type": "default", "rope_theta": 5000.0}
    assert model_from_config(LLAMA | {"rope_theta": 5000, "rope_parameters": nested}).rope.theta == 5000.0
    with pytest.raises(CheckpointError, match="rope_theta"):
        model_from_config(LLAMA | {"rope_theta": 10000, "rope_parameters": nested})
    with pytest.raises(CheckpointError, match="disagree"):
        model_from_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": nested})


def test_defaults_are_those_of_the_family():
    assert model_from_config(LLAMA).rope.theta == 10000.0
    assert model_from_config(family("SmolLM3")).rope.theta == 2000000.0
    assert model_from_config(family("SmolLM3")).tie_word_embeddings
    assert not model_from_config(LLAMA).tie_word_embeddings
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_from_config(without).num_kv_heads == 4
    only_type = {key: value for key, value in LLAMA.items() if key != "architectures"} | {"model_type": "qwen2"}
    assert model_from_config(only_type).architecture == "Qwen2ForCausalLM"


LONGROPE = {"type": "longrope", "original_max_position_embeddings": 8, "short_factor": [1.0], "long_factor": [4.0]}


def test_longrope_from_either_place():
    inside = model_from_config(config_of("llama") | {"rope_parameters": None, "rope_scaling": LONGROPE}).rope
    outside = {k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"}
    config = config_of("llama") | {"rope_parameters": None, "rope_scaling": outside}
    assert model_from_config(config | {"original_max_position_embeddings": 8}).rope == inside
    assert dict(inside.parameters)["long_factor"] == (4.0,)


def test_fp8_schemes_are_accepted():
    weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
    for scheme in (
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}},
    ):
        assert model_from_config(config_of("llama") | {"quantization_config": scheme}) == model_from_config(
            config_of("llama")
        )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM")),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, ("ntk", "llama3")),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ("longrope", "original_max_position_embeddings")),
        ({"rope_scaling": LONGROPE | {"long_factor": 4.0}}, ("long_factor", "list")),
        ({"rope_scaling": LONGROPE | {"long_factor": [4.0, 0.0]}}, ("long_factor", "positive")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("linear", "factor")),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}}, ("alpha",)),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ("per layer type",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"hidden_act": "gelu"}, ("gelu", "silu")),
        ({"quantization_config": {"quant_method": "awq"}}, ("quantization_config", "awq", "unquantised")),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            ("pack-quantized",),
        ),
        ({"num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
        ({"head_dim": 15}, ("head_dim 15",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers",)),
        ({"vocab_size": None}, ("vocab_size",)),
        ({"layer_types": ["full_attention"]}, ("layer_types", "1", "3")),
        ({"layer_types": ["linear_attention"] * 3}, ("linear_attention",)),
        ({"layer_types": ["sliding_attention"] * 3}, ("sliding_window",)),
    ],
)
def test_what_cannot_be_run_is_named(changes, named):
    with pytest.raises(CheckpointError) as info:
        model_from_config(LLAMA | changes)
    error_message(info, *named)


def test_dtype():
    assert model_from_config(LLAMA).dtype == "float32"
    assert model_from_config(LLAMA | {"torch_dtype": "bfloat16"}, dtype="auto").dtype == "bfloat16"
    assert model_from_config(LLAMA | {"dtype": "float16"}, dtype="auto").dtype == "float16"
    assert model_from_config(LLAMA, dtype="auto").dtype == "float32"
    with pytest.raises(CheckpointError, match="int4"):
        model_from_config(LLAMA, dtype="int4")
    with pytest.raises(CheckpointError, match="rows"):
        model_from_config(LLAMA, layout="rows")
