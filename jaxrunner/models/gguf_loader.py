"""Configuration and weights from a GGUF file (llama.cpp's format), as float32 dequantisation or a rounding of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.model import Model
from jaxrunner.models.weights import build_weights, weight_table

ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies, which Llama 3.1 and later files carry instead of a rule."""
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
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


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """The configuration dictionary that `model_from_config` takes, from a file's metadata.

    Raises `CheckpointError` for an architecture or a rotary rule that cannot be run, naming it and what can.
    """
    meta = file.metadata
    arch = str(meta.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {arch!r} is not supported. Supported: {', '.join(ARCHITECTURES)}. "
            "Use the model's safetensors checkpoint if its family is supported there."
        )

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{key}", default)
        if value is None:
            raise CheckpointError(f"{file.path} lacks the metadata {arch}.{key}. Convert the model again.")
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise CheckpointError(f"{file.path}: {arch}.{key} differs between layers, which is not supported.")
            value = value[0]
        return value

    def size(key: str, default: Any = None) -> int:
        if not isinstance(value := get(key, default), int) or value <= 0:
            raise CheckpointError(f"{file.path}: {arch}.{key} is {value!r}, no positive integer. Convert it again.")
        return value

    if get("expert_count", 0):
        raise CheckpointError(f"{file.path}: a mixture of {get('expert_count')} experts is not supported.")
    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {arch}.{key} {get(key)} differs from the head size {head_dim}.")
    return {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "dtype": {"1": "float16", "32": "bfloat16"}.get(str(meta.get("general.file_type")), "float32"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "max_position_embeddings": size("context_length"),
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "num_attention_heads": heads,
        "num_hidden_layers": size("block_count"),
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rope(file, arch),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "vocab_size": _embedding_rows(file),
    }


def _shortest(value: Any) -> Any:
    """The number that was written as a float32, so that 9.999999747378752e-06 is 1e-05 again.

    Anything but a number is handed on, for `model_from_config` to refuse.
    """
    if not isinstance(value, float):
        return value
    return float(str(np.float32(value)))


def _embedding_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} lacks tensor 'token_embd.weight'. Use a file with the whole model.")
    shape = file.tensors["token_embd.weight"].shape
    return shape[0] if shape else 0


def _rope(file: GGUFFile, arch: str) -> dict[str, Any]:
    meta = file.metadata
    base = _shortest(meta.get(f"{arch}.rope.freq_base", 10000.0))
    rule: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    factor = meta.get(f"{arch}.rope.scaling.factor", meta.get(f"{arch}.rope.scale_linear"))
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise CheckpointError(f"{file.path}: {ROPE_FACTORS} and rope scaling {kind!r} at once are not supported.")
        factors = file.read(ROPE_FACTORS).reshape(-1).tolist()
        context = meta.get(f"{arch}.context_length")
        rule |= {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": context}
        return rule | {"short_factor": factors, "long_factor": factors}
    if kind == "none" and factor in (None, 0.0, 1.0):
        return rule
    names = {"yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attn_factor"}
    names |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    names |= {"original_context_length": "original_max_position_embeddings"}
    rule |= {"rope_type": "linear" if kind == "none" else kind, "factor": factor}
    for key, name in names.items():
        if (value := meta.get(f"{arch}.rope.scaling.{key}")) is not None:
            rule[name] = value
    return rule


def gguf_name(hf_name: str) -> str:
    """GGUF's name of the tensor that is `hf_name` in Hugging Face checkpoints."""
    if hf_name in _TOP:
        return _TOP[hf_name]
    layer, name = hf_name.removeprefix("model.layers.").split(".", 1)
    module, kind = name.rsplit(".", 1)
    return f"blk.{layer}.{_IN_LAYER[module]}.{kind}"


def load_weights(model: Model, file: GGUFFile) -> dict[str, Any]:
    """The weights of `model` from a GGUF file, as arrays of `model.dtype` in the tree of `weight_table(model)`.

    Tensors are dequantised in float32 one at a time. llama.cpp's converter reorders the rows of q and k of the `llama`
    architecture for interleaved rotation; that is undone here, with the number of query heads for q and of key heads
    for k. Raises `CheckpointError` naming the file and the tensor before any weight is read.
    """
    wanted = {part.hf_name: part.shape for spec in jax.tree.leaves(weight_table(model)) for part in spec.parts()}
    for hf_name, shape in wanted.items():
        name = gguf_name(hf_name)
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} lacks tensor {name!r}, which {model.architecture} needs.")
        if file.tensors[name].shape != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has shape {list(file.tensors[name].shape)}, its metadata asks for "
                f"{list(shape)}. Convert the model again."
            )
    if extra := sorted(set(file.tensors) - {gguf_name(hf_name) for hf_name in wanted} - {ROPE_FACTORS}):
        raise CheckpointError(f"{file.path} holds tensor {extra[0]!r}, for which {model.architecture} has no place.")
    permuted = file.metadata.get("general.architecture") == "llama"

    def read(hf_name: str) -> np.ndarray:
        array = file.read(gguf_name(hf_name))
        if permuted and ".self_attn.q_proj." in hf_name:
            return unpermute(array, model.num_heads)
        if permuted and ".self_attn.k_proj." in hf_name:
            return unpermute(array, model.num_kv_heads)
        return array

    return build_weights(model, read)


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from interleaved order (0, d/2, 1, d/2+1, ...) back to (0, 1, ..., d-1)."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
