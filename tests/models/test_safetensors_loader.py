import json
import math
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.config import model_from_config
from jaxrunner.models.safetensors_file import SafetensorsFile
from jaxrunner.models.safetensors_loader import load_weights

from .checkpoints import (
    GOLDEN,
    TINY,
    config_of,
    error_message,
    read_bf16_as_float32,
    read_raw,
    write_directory,
    write_safetensors,
)


def copy_of(name, target):
    shutil.copytree(GOLDEN / "tiny" / name, target)
    return target


def rewrite(directory, change):
    """Apply `change` to the raw tensors of a directory's only file."""
    raw = read_raw(directory / "model.safetensors")
    change(raw)
    write_safetensors(directory / "model.safetensors", raw)
    return model_from_config(json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("name", TINY)
def test_weights_are_bit_exact_and_in_their_rows(name):
    directory = GOLDEN / "tiny" / name
    model = model_from_config(config_of(name))
    want, got = read_bf16_as_float32(directory / "model.safetensors"), load_weights(model, directory)

    def joined(i, *names):
        return np.concatenate([want[f"model.layers.{i}.{n}"] for n in names])

    np.testing.assert_array_equal(got["embed_tokens"], want["model.embed_tokens.weight"], strict=True)
    np.testing.assert_array_equal(got["norm"], want["model.norm.weight"])
    for i, layer in enumerate(got["layers"]):
        qkv, mlp = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
        np.testing.assert_array_equal(layer["qkv"], joined(i, *[f"{n}.weight" for n in qkv]), strict=True)
        np.testing.assert_array_equal(layer["gate_up"], joined(i, *[f"{n}.weight" for n in mlp]))
        np.testing.assert_array_equal(layer["o"], joined(i, "self_attn.o_proj.weight"))
        np.testing.assert_array_equal(layer["down"], joined(i, "mlp.down_proj.weight"))
        np.testing.assert_array_equal(layer["input_norm"], joined(i, "input_layernorm.weight"))
        np.testing.assert_array_equal(layer["post_norm"], joined(i, "post_attention_layernorm.weight"))
        for key, names in {
            "qkv_bias": [f"{n}.bias" for n in qkv],
            "o_bias": ["self_attn.o_proj.bias"],
            "gate_up_bias": [f"{n}.bias" for n in mlp],
            "down_bias": ["mlp.down_proj.bias"],
            "q_norm": ["self_attn.q_norm.weight"],
            "k_norm": ["self_attn.k_norm.weight"],
        }.items():
            assert (key in layer) == (f"model.layers.{i}.{names[0]}" in want)
            if key in layer:
                np.testing.assert_array_equal(layer[key], joined(i, *names))


def test_stacked_layout_and_bfloat16():
    directory = GOLDEN / "tiny" / "qwen3"
    model = model_from_config(config_of("qwen3"), dtype="auto")
    layers, stacked = load_weights(model, directory), load_weights(model.replace(layout="stacked"), directory)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(layers))
    for name, leaf in stacked["layers"].items():
        np.testing.assert_array_equal(leaf, np.stack([layer[name] for layer in layers["layers"]]))
    want = read_bf16_as_float32(directory / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(layers["embed_tokens"], np.float32), want)


def test_k093_tied_without_output_matrix_and_nothing_left_unfilled(tmp_path):
    directory = copy_of("llama_bias_tied_headdim", tmp_path / "m")
    model = model_from_config(config_of("llama_bias_tied_headdim"))
    assert "lm_head" not in load_weights(model, directory)
    untied = model.replace(tie_word_embeddings=False)
    with pytest.raises(CheckpointError) as info:
        load_weights(untied, directory)
    error_message(info, directory, "lm_head.weight")


def test_k094_tied_with_output_matrix_in_the_file(tmp_path):
    directory = copy_of("llama_bias_tied_headdim", tmp_path / "m")
    model = rewrite(directory, lambda raw: raw.update({"lm_head.weight": raw["model.embed_tokens.weight"]}))
    assert "lm_head" not in load_weights(model, directory)

    def differ(raw):
        kind, shape, data = raw["lm_head.weight"]
        raw["lm_head.weight"] = (kind, shape, data[:-2] + b"\x00\x00")

    rewrite(directory, differ)
    with pytest.raises(CheckpointError) as info:
        load_weights(model, directory)
    error_message(info, "lm_head.weight", "tie_word_embeddings")


def test_k095_k096_shapes_follow_head_dim(tmp_path):
    config = config_of("llama") | {"hidden_size": 100, "num_attention_heads": 12, "num_key_value_heads": 4}
    model = model_from_config(config | {"head_dim": 16, "num_hidden_layers": 1})
    rng = np.random.default_rng(0)
    base = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (256, 100),
        "model.norm.weight": (100,),
        "lm_head.weight": (256, 100),
        f"{base}input_layernorm.weight": (100,),
        f"{base}post_attention_layernorm.weight": (100,),
        f"{base}self_attn.q_proj.weight": (192, 100),
        f"{base}self_attn.k_proj.weight": (64, 100),
        f"{base}self_attn.v_proj.weight": (64, 100),
        f"{base}self_attn.o_proj.weight": (100, 192),
        f"{base}mlp.gate_proj.weight": (96, 100),
        f"{base}mlp.up_proj.weight": (96, 100),
        f"{base}mlp.down_proj.weight": (100, 96),
    }
    directory = write_directory(tmp_path, config, {n: rng.normal(size=s) for n, s in shapes.items()})
    weights = load_weights(model, directory)
    assert weights["layers"][0]["qkv"].shape == (320, 100)
    assert weights["layers"][0]["o"].shape == (100, 192)


def split(directory, count):
    """Replace the only file by `count` shards and an index."""
    raw = list(read_raw(directory / "model.safetensors").items())
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        write_safetensors(directory / name, dict(raw[i::count]))
        weight_map |= dict.fromkeys([tensor for tensor, _ in raw[i::count]], name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_equal_the_single_file(tmp_path):
    directory = copy_of("llama", tmp_path / "m")
    model = model_from_config(config_of("llama"))
    single = load_weights(model, directory)
    split(directory, 3)
    jax.tree.map(np.testing.assert_array_equal, load_weights(model, directory), single)


def test_k100_missing_shard_is_named_before_anything_is_read(tmp_path, monkeypatch):
    directory = copy_of("llama", tmp_path / "m")
    split(directory, 3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name: pytest.fail(f"{name} was read"))
    with pytest.raises(CheckpointError) as info:
        load_weights(model_from_config(config_of("llama")), directory)
    error_message(info, "model-00002-of-00003.safetensors", "missing")


def test_index_naming_a_tensor_its_shard_lacks(tmp_path):
    directory = copy_of("llama", tmp_path / "m")
    split(directory, 2)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    content["weight_map"]["model.embed_tokens.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors lacks tensor"):
        load_weights(model_from_config(config_of("llama")), directory)


@pytest.mark.parametrize("cut", [{"cut": 100}, {"extra": b"\x00" * 8}, {"cut": 4090}])
def test_k103_file_length_must_agree_with_the_header(tmp_path, cut):
    path = tmp_path / "model.safetensors"
    tensors = {"a": ("F32", (512,), bytes(2048)), "b": ("F32", (512,), bytes(2048))}
    write_safetensors(path, tensors)
    assert set(SafetensorsFile.open(path).tensors) == {"a", "b"}
    write_safetensors(path, tensors, **cut)
    with pytest.raises(CheckpointError) as info:
        SafetensorsFile.open(path)
    error_message(info, path, path.stat().st_size)


@pytest.mark.parametrize(
    "data", [b"", b"\x10\x00", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{x"]
)
def test_damaged_headers_are_refused(tmp_path, data):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged"):
        SafetensorsFile.open(path)


def test_overlapping_tensors_are_refused(tmp_path):
    header = {n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match="'b' begins at"):
        SafetensorsFile.open(path)


def test_k101_bfloat16_is_bit_exact_including_nan_payloads(tmp_path):
    path = tmp_path / "a.safetensors"
    data = bytes.fromhex("803f20c0c17f017f")
    write_safetensors(path, {"x": ("BF16", (4,), data)})
    array = SafetensorsFile.open(path).read("x")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.tobytes() == data
    np.testing.assert_array_equal(array[:2].astype(np.float32), [1.0, -2.5])


def test_k102_fp8_keeps_its_bytes_and_unknown_types_are_named(tmp_path):
    path = tmp_path / "a.safetensors"
    data = {"a": ("F8_E4M3", (2,), b"\x38\xb8"), "b": ("F8_E5M2", (2,), b"\x3c\xbc"), "c": ("F6_E2M3", (4,), bytes(3))}
    write_safetensors(path, data)
    file = SafetensorsFile.open(path)
    assert file.read("a").dtype == ml_dtypes.float8_e4m3fn
    assert file.read("a").tobytes() == b"\x38\xb8"
    for name in "ab":
        np.testing.assert_array_equal(file.read(name).astype(np.float32), [1.0, -1.0])
    with pytest.raises(CheckpointError) as info:
        file.read("c")
    error_message(info, path, "'c'", "F6_E2M3")


def test_k104_no_tensors_and_zero_size_tensors(tmp_path):
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {}, metadata={"format": "np"})
    file = SafetensorsFile.open(path)
    assert (dict(file.tensors), file.metadata) == ({}, {"format": "np"})
    write_safetensors(path, {"z": ("F32", (0, 4), b""), "one": ("F32", (1,), b"\x00\x00\x80\x3f")})
    file = SafetensorsFile.open(path)
    assert file.read("z").shape == (0, 4)
    assert file.read("one").tolist() == [1.0]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: raw.pop("model.norm.weight"), ("model.norm.weight", "lacks")),
        (lambda raw: raw.update(x=("F32", (1,), bytes(4))), ("'x'", "no place")),
        (
            lambda raw: raw.update({"model.norm.weight": ("BF16", (32,), bytes(64))}),
            ("norm.weight", "[32]", "[64]"),
        ),
        (lambda raw: raw.update({"model.norm.weight": ("I16", (64,), bytes(128))}), ("model.norm.weight", "I16")),
    ],
)
def test_missing_extra_and_misshaped_tensors_are_named_before_loading(tmp_path, monkeypatch, change, named):
    directory = copy_of("llama", tmp_path / "m")
    model = rewrite(directory, change)
    monkeypatch.setattr(SafetensorsFile, "read", lambda self, name: pytest.fail(f"{name} was read"))
    with pytest.raises(CheckpointError) as info:
        load_weights(model, directory)
    error_message(info, directory, *named)


def test_known_harmless_extras_are_ignored(tmp_path):
    directory = copy_of("llama", tmp_path / "m")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (8,), bytes(32))}
    model = rewrite(directory, lambda raw: raw.update(extra))
    assert len(load_weights(model, directory)["layers"]) == 3


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError) as info:
        load_weights(model_from_config(config_of("llama")), tmp_path)
    error_message(info, "pytorch_model.bin", "safetensors")


def quantised(name, per, scale):
    """A bfloat16 tensor of a file as 8-bit floats, with a scale for all of it, each row or each block.

    Returns (the change of the file, a dictionary that then holds the dequantised values).
    """
    result = {}

    def change(raw):
        kind, shape, data = raw[name]
        assert kind == "BF16"
        rows, columns = shape
        scale_shape = {"tensor": (), "one": (1,), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[per]
        scales = (scale * np.arange(1, 1 + math.prod(scale_shape))).astype(np.float32).reshape(scale_shape)
        full = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns] if per == "block" else scales
        values = np.frombuffer(data, ml_dtypes.bfloat16).reshape(shape).astype(np.float32)
        eight = np.clip(values / full, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        raw[name] = ("F8_E4M3", shape, eight.tobytes())
        raw[name + ("_scale_inv" if per == "block" else "_scale")] = ("F32", scale_shape, scales.tobytes())
        raw[name.removesuffix(".weight") + ".input_scale"] = ("F32", (), np.float32(3).tobytes())
        result["values"] = eight.astype(np.float32) * full

    return change, result


@pytest.mark.parametrize("per", ["tensor", "one", "row", "block"])
def test_k105_each_part_of_a_fused_matrix_has_its_own_scale(tmp_path, per):
    """q, k and v become one matrix here; their scales are of their own and need not agree."""
    directory = copy_of("llama", tmp_path / "m")
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
    want = []
    for name, scale in zip(names, (0.01, 0.02, 0.04), strict=True):
        change, result = quantised(name, per, scale)
        model = rewrite(directory, change)
        want.append(result["values"])
    got = load_weights(model, directory)["layers"][0]["qkv"]
    np.testing.assert_array_equal(got, np.concatenate(want))
    assert np.abs(got - load_weights(model, GOLDEN / "tiny" / "llama")["layers"][0]["qkv"]).max() < 0.07


def test_an_8_bit_weight_needs_a_scale_that_fits(tmp_path):
    directory, name = copy_of("llama", tmp_path / "m"), "model.layers.1.mlp.down_proj.weight"
    model = rewrite(directory, quantised(name, "row", 0.01)[0])
    load_weights(model, directory)

    def misshape(raw):
        kind, shape, data = raw[name + "_scale"]
        raw[name + "_scale"] = (kind, (shape[0] // 2, 1), data[: len(data) // 2])

    rewrite(directory, misshape)
    with pytest.raises(CheckpointError) as info:
        load_weights(model, directory)
    error_message(info, name + "_scale", "one for each row")
    rewrite(directory, lambda raw: raw.pop(name + "_scale"))
    with pytest.raises(CheckpointError) as info:
        load_weights(model, directory)
    error_message(info, name, "F8_E4M3", "no scale")
