"""A whole step of a Llama-family model over a paged KV cache, one request after the other, in NumPy float64.

Written from the model's equations and from the rules of the step; shares no code with the package. Everything is
plain: dictionaries, lists, arrays.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from pathlib import Path

import numpy as np

from tests.oracle import threefry


def read_weights(directory: Path) -> dict[str, np.ndarray]:
    """Checkpoint name -> float64, from a safetensors file of bfloat16 and float32 tensors."""
    data = (directory / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    out = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(data[begin:end], "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            assert entry["dtype"] == "F32"
            value = np.frombuffer(data[begin:end], "<f4")
        out[name] = value.reshape(entry["shape"]).astype(np.float64)
    return out


def read_config(directory: Path, windows: list[int | None] | None = None) -> dict:
    """What the oracle needs of config.json. windows: sliding window of each layer, if not the file's."""
    c = json.loads((directory / "config.json").read_text())
    rope = c["rope_parameters"]
    assert rope["rope_type"] == "default"
    layers, heads = c["num_hidden_layers"], c["num_attention_heads"]
    file_window = c.get("sliding_window") if c["model_type"] == "mistral" else None
    return {
        "layers": layers,
        "heads": heads,
        "kv_heads": c["num_key_value_heads"],
        "head_dim": c.get("head_dim") or c["hidden_size"] // heads,
        "eps": c["rms_norm_eps"],
        "theta": rope["rope_theta"],
        "windows": windows or [file_window] * layers,
    }


def step(config: dict, weights: dict, state: dict, batch: list[tuple[int, int]]) -> tuple[dict, list[dict]]:
    """(state after the step, one result per request).

    state: token_ids [row][position]; prefill_len, total_len, num_computed, last_sampled, temperature, seed by row;
    tables[group][row], block ids; groups[group], layers that share tables; block_size[group]; kv[group],
    [layer of the group, key or value, block, offset, head, dim]. batch: (row, tokens to run) in any order.
    A result: hidden [tokens, hidden] after the final norm, logits of the last token, sampled id or None, and margin,
    by how much the best score beats the second.
    """
    state = copy.deepcopy(state)
    results = []
    for row, count in batch:
        computed = state["num_computed"][row]
        if count == 0:
            results.append({"hidden": np.zeros((0, 0)), "logits": None, "sampled": None, "margin": math.inf})
            continue
        positions = list(range(computed, computed + count))
        hidden = _forward(config, weights, state, row, positions, [_input_id(state, row, p) for p in positions])
        head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        result = {"hidden": hidden, "logits": head @ hidden[-1], "sampled": None, "margin": math.inf}
        state["num_computed"][row] = computed + count
        if computed + count >= state["prefill_len"][row]:
            result["sampled"], result["margin"] = _choose(state, row, result["logits"], computed + count)
            _append(state, row, result["sampled"])
        results.append(result)
    return state, results


def _input_id(state: dict, row: int, position: int) -> int:
    if position < state["prefill_len"][row]:
        return int(state["token_ids"][row][position])
    assert position == state["total_len"][row] - 1
    return int(state["last_sampled"][row])


def _choose(state: dict, row: int, logits: np.ndarray, position: int) -> tuple[int, float]:
    temperature = state["temperature"][row]
    scores = logits
    if temperature > 0:
        noise = threefry.gumbel(threefry.row_key(state["seed"][row], position), len(logits))
        scores = logits / float(np.float32(temperature)) + noise
    second, first = np.sort(scores)[-2:]
    return int(np.argmax(scores)), float(first - second)


def _append(state: dict, row: int, token: int) -> None:
    end = state["total_len"][row]
    if end < len(state["token_ids"][row]):
        state["token_ids"][row][end] = token
    state["total_len"][row] = end + 1
    state["last_sampled"][row] = token


def _forward(config: dict, w: dict, state: dict, row: int, positions: list[int], ids: list[int]) -> np.ndarray:
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config["layers"]):
        p = f"model.layers.{layer}."
        x = x + _attention(config, w, state, row, positions, layer, _rms(x, w[p + "input_layernorm.weight"], config))
        h = _rms(x, w[p + "post_attention_layernorm.weight"], config)
        gate, up = _linear(w, p + "mlp.gate_proj", h), _linear(w, p + "mlp.up_proj", h)
        x = x + _linear(w, p + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
    return _rms(x, w["model.norm.weight"], config)


def _attention(config, w, state, row, positions, layer, h):
    heads, kv_heads, dim = config["heads"], config["kv_heads"], config["head_dim"]
    p, n = f"model.layers.{layer}.self_attn.", len(positions)
    q = _rope(config, _linear(w, p + "q_proj", h).reshape(n, heads, dim), positions)
    k = _rope(config, _linear(w, p + "k_proj", h).reshape(n, kv_heads, dim), positions)
    v = _linear(w, p + "v_proj", h).reshape(n, kv_heads, dim)
    (group,) = (g for g, members in enumerate(state["groups"]) if layer in members)
    cache = state["kv"][group][state["groups"][group].index(layer)]
    table, size = state["tables"][group][row], state["block_size"][group]
    for i, position in enumerate(positions):
        cache[0, table[position // size], position % size] = k[i]
        cache[1, table[position // size], position % size] = v[i]
    out = np.zeros((n, heads, dim))
    window = config["windows"][layer]
    for i, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        t = np.arange(first, position + 1)
        keys, values = cache[:, np.asarray(table)[t // size], t % size]
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = keys[:, kv_head] @ q[i, head] / math.sqrt(dim)
            weight = np.exp(scores - scores.max())
            out[i, head] = weight @ values[:, kv_head] / weight.sum()
    return _linear(w, p + "o_proj", out.reshape(n, heads * dim))


def _rope(config, x, positions):
    half = config["head_dim"] // 2
    angle = np.outer(positions, config["theta"] ** (-np.arange(half) / half))[:, None, :]
    rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([rotated.real, rotated.imag], axis=-1)


def _rms(x, weight, config):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config["eps"]) * weight


def _linear(w, name, x):
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)
