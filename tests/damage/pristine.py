"""A whole checkpoint of a few KB in each format, from which the damaged ones are made."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 8, 2, 1, 4, 12, 24, 2

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 2,
}
_IN_LAYER = {
    "input_layernorm": ("attn_norm", (HIDDEN,)),
    "self_attn.q_proj": ("attn_q", (HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.k_proj": ("attn_k", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.v_proj": ("attn_v", (KV_HEADS * HEAD_DIM, HIDDEN)),
    "self_attn.o_proj": ("attn_output", (HIDDEN, HEADS * HEAD_DIM)),
    "post_attention_layernorm": ("ffn_norm", (HIDDEN,)),
    "mlp.gate_proj": ("ffn_gate", (MLP, HIDDEN)),
    "mlp.up_proj": ("ffn_up", (MLP, HIDDEN)),
    "mlp.down_proj": ("ffn_down", (HIDDEN, MLP)),
}
_TOP = {
    "model.embed_tokens": ("token_embd", (VOCAB, HIDDEN)),
    "model.norm": ("output_norm", (HIDDEN,)),
    "lm_head": ("output", (VOCAB, HIDDEN)),
}


def _names() -> list[tuple[str, str, tuple[int, ...]]]:
    """(Hugging Face name, GGUF name, shape) of every tensor."""
    inside = [
        (f"model.layers.{i}.{name}.weight", f"blk.{i}.{other}.weight", shape)
        for i in range(LAYERS)
        for name, (other, shape) in _IN_LAYER.items()
    ]
    return [(f"{n}.weight", f"{o}.weight", s) for n, (o, s) in _TOP.items()] + inside


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, _, shape in _names()}


def safetensors_parts() -> tuple[dict, bytes]:
    """(header, data) of the whole model as one file."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors().items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    return header, data


def safetensors_bytes(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tokenizer_text() -> str:
    vocab = {f"w{i}": i for i in range(VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return backend.to_str()


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(chr, range(ord("a"), ord("a") + VOCAB - 1)), "ab"])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    arrays = tensors()
    for name, other, _ in _names():
        interleaved = arrays[name]
        if "q_proj" in name or "k_proj" in name:  # as llama.cpp's converter writes them
            halves = interleaved.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
            interleaved = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(interleaved.shape)
        writer.add_tensor(other, interleaved)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
