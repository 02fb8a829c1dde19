import re

import gguf
import jax
import numpy as np
import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.config import model_from_config
from jaxrunner.models.default_model import default_model_path
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.gguf_loader import config_from_gguf, load_weights
from jaxrunner.models.rope import inv_freq
from jaxrunner.models.safetensors_loader import load_weights as load_safetensors

from .checkpoints import GOLDEN, config_of, error_message, read_bf16_as_float32

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(array, heads):
    """Rows as llama.cpp's converter writes them for the llama architecture: row 2j <- j, row 2j + 1 <- d/2 + j."""
    size = array.shape[0] // heads
    order = [h * size + half * (size // 2) + j for h in range(heads) for j in range(size // 2) for half in (0, 1)]
    return array[order]


def write_gguf(path, name, arch, change=lambda writer: None, **changes):
    """A tiny golden model as a GGUF file; float32 norms, float16 matrices."""
    config = config_of(name) | changes
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config.get("head_dim", 16))
    writer.add_value_length(config.get("head_dim", 16))
    writer.add_rope_dimension_count(config.get("head_dim", 16))
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(1)
    writer.add_eos_token_id(2)
    change(writer)
    for hf_name, array in read_bf16_as_float32(GOLDEN / "tiny" / name / "model.safetensors").items():
        layer, module, kind = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)\.(weight|bias)", hf_name).groups()
        if arch == "llama" and module.endswith(("q_proj", "k_proj")):
            array = interleaved(array, heads if module.endswith("q_proj") else kv_heads)
        target = f"{NAMES[module]}.{kind}" if layer is None else f"blk.{layer}.{NAMES[module]}.{kind}"
        writer.add_tensor(target, array.astype(np.float16 if array.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("name", "arch"),
    [("llama", "llama"), ("llama_bias_tied_headdim", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")],
)
@pytest.mark.parametrize("layout", ["layers", "stacked"])
def test_gguf_gives_the_model_and_weights_of_the_safetensors_checkpoint(tmp_path, name, arch, layout):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", name, arch))
    model = model_from_config(config_from_gguf(file), layout=layout)
    want = model_from_config(config_of(name), layout=layout)
    assert model == want
    expected = load_safetensors(want, GOLDEN / "tiny" / name)
    # Matrices were stored as float16, which holds these bfloat16 values except for the smallest.
    rounded = jax.tree.map(lambda a: np.asarray(a), expected)
    got = load_weights(model, file)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2**-24), got, rounded)


def test_dtype_auto_is_the_type_of_the_file(tmp_path):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", "llama"))
    assert model_from_config(config_from_gguf(file), dtype="auto").dtype == "float16"


def test_rope_scaling(tmp_path):
    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama_rope_yarn", "llama", yarn))
    assert model_from_config(config_from_gguf(file)).rope == model_from_config(config_of("llama_rope_yarn")).rope


def test_rope_factors_in_a_tensor(tmp_path):
    """As Llama 3.1's files have them: every frequency is divided by its factor, at all lengths alike."""
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", "llama", lambda w: w.add_tensor("rope_freqs.weight", factors))
    file = GGUFFile.open(path)
    model = model_from_config(config_from_gguf(file))
    load_weights(model, file)
    plain = model_from_config(config_of("llama")).rope
    for context in (8, 10**6):
        got, attention_factor = inv_freq(model.rope, 16, 128, context)
        np.testing.assert_allclose(got, inv_freq(plain, 16, 128)[0] / factors, rtol=1e-6)
        assert attention_factor == 1.0


def with_factors_and_yarn(writer):
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def test_architectures_that_cannot_be_run_are_named(tmp_path):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", "gemma2"))
    with pytest.raises(CheckpointError) as info:
        config_from_gguf(file)
    error_message(info, tmp_path, "gemma2", "llama")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda writer: writer.add_expert_count(8), "8 experts"),
        (with_factors_and_yarn, "rope_freqs.weight and rope scaling 'yarn'"),
    ],
)
def test_features_that_cannot_be_run_are_named(tmp_path, change, named):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", "llama", change))
    with pytest.raises(CheckpointError, match=named):
        config_from_gguf(file)


def test_missing_extra_and_misshaped_tensors_are_named(tmp_path, monkeypatch):
    def extra(writer):
        writer.add_tensor("surprise.weight", np.ones(8, np.float32))

    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", "llama", "llama", extra))
    model = model_from_config(config_from_gguf(file))
    monkeypatch.setattr(GGUFFile, "read", lambda self, name: pytest.fail(f"{name} was read"))
    for changed, named in (
        (model, "surprise.weight"),
        (model.replace(qk_norm=True), "blk.0.attn_k_norm.weight"),
        (model.replace(intermediate_size=95), "blk.0.ffn_down.weight"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(named)):
            load_weights(changed, file)


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 1000, -1, -5000])
def test_truncated_files_are_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf", "llama", "llama")
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"m.gguf is damaged"):
        GGUFFile.open(path)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF"):
        GGUFFile.open(path)


def test_types_without_a_dequantiser_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", np.arange(8, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as info:
        GGUFFile.open(path).read("a")
    error_message(info, path, "'a'", "I32")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16", "F32"])
def test_every_storage_type_is_near_what_was_stored(tmp_path, kind):
    path, values = tmp_path / "m.gguf", np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a", gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFFile.open(path).read("a")
    assert (got.shape, got.dtype) == ((4, 64), np.float32)
    np.testing.assert_allclose(got, values, atol={"Q4_0": 0.3, "Q4_1": 0.2, "Q5_0": 0.15}.get(kind, 0.02))


def dequantised(tensor):
    """Q4_1, Q8_0 and F32 from `gguf.GGUFReader`'s bytes, block by block."""
    kind, raw = tensor.tensor_type.name, np.asarray(tensor.data)
    shape = tuple(int(n) for n in tensor.shape[::-1])
    if kind == "F32":
        return raw.reshape(shape)
    blocks = raw.reshape(-1, {"Q4_1": 20, "Q8_0": 34}[kind])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * nibbles + minimum).reshape(shape)


@pytest.mark.smollm2
def test_smollm2_is_bit_equal_to_another_dequantiser():
    file = GGUFFile.open(default_model_path())
    model = model_from_config(config_from_gguf(file))
    assert (model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert (model.rms_norm_eps, model.rope.theta, model.tie_word_embeddings) == (1e-5, 100000.0, True)
    weights = load_weights(model, file)
    reader = gguf.GGUFReader(default_model_path())
    want = {tensor.name: tensor for tensor in reader.tensors}
    assert len(want) == len(file.tensors) == 272
    assert file.metadata["tokenizer.ggml.merges"] == reader.fields["tokenizer.ggml.merges"].contents()
    assert file.metadata["tokenizer.chat_template"] == reader.fields["tokenizer.chat_template"].contents()
    np.testing.assert_array_equal(weights["embed_tokens"], dequantised(want["token_embd.weight"]), strict=True)
    np.testing.assert_array_equal(weights["norm"], dequantised(want["output_norm.weight"]))
    stored_names = [key[6:-7] for key in want if key.startswith("blk.0.")]
    for i, layer in enumerate(weights["layers"]):
        qkv = np.asarray(layer["qkv"])
        stored = {name: dequantised(want[f"blk.{i}.{name}.weight"]) for name in stored_names}
        np.testing.assert_array_equal(interleaved(qkv[:576], 9), stored["attn_q"])
        np.testing.assert_array_equal(interleaved(qkv[576:768], 3), stored["attn_k"])
        np.testing.assert_array_equal(qkv[768:], stored["attn_v"])
        np.testing.assert_array_equal(layer["o"], stored["attn_output"])
        np.testing.assert_array_equal(layer["gate_up"], np.concatenate([stored["ffn_gate"], stored["ffn_up"]]))
        np.testing.assert_array_equal(layer["down"], stored["ffn_down"])
        np.testing.assert_array_equal(layer["input_norm"], stored["attn_norm"])
        np.testing.assert_array_equal(layer["post_norm"], stored["ffn_norm"])
