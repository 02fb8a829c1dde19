"""The decoder-only transformer of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM3), over a paged KV cache.

Written once for both weight layouts: `"layers"` unrolls the layers in Python around one inner jit of the layer body
(traced once for all equal layers), `"stacked"` scans over weights with a leading layer axis, or on a GPU unrolls over
them too. The KV cache is carried through, never scanned over, which would copy it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from jaxrunner.models.layers import linear, rms_norm, rotary_table
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_with_rope import attention_with_rope
from jaxrunner.pallas.implementation import Implementation, mosaic_unavailable
from jaxrunner.pallas.target import target


def forward(
    model: Model,
    weights: Any,
    blocks: tuple[jax.Array, ...],
    input_ids: Int32[Array, "T"],
    positions: Int32[Array, "T"],
    metadata: tuple[AttentionMetadata, ...],
    group_of_layer: dict[int, tuple[int, int]],
    *,
    kv_scales: tuple[jax.Array, ...] = (),
    max_model_len: int | None = None,
    implementation: Implementation = None,
) -> tuple[tuple[jax.Array, ...], Float[Array, "T H"]]:
    """(cache with this step's keys and values, hidden states [T, hidden] after the final norm).

    blocks: the cache of each KV-cache group. metadata: one per group. group_of_layer: model layer -> (group, index in
    the group). kv_scales: of a float8 cache, one array per group, see `KVCache`. max_model_len: positions the run may
    use, see `rotary_table`.
    """
    metadata = tuple(_with_counters(each, len(input_ids) * model.num_heads) for each in metadata)
    x = weights["embed_tokens"][input_ids]
    rope = rotary_table(model, positions, max_model_len)
    run = functools.partial(_layer, model=model, implementation=_frozen(implementation))
    caches, scales = list(blocks), kv_scales or (None,) * len(blocks)
    stacked = model.layout == "stacked"
    if stacked and (len(caches) != 1 or len(set(model.layers)) != 1):
        raise ValueError("stacked weights need layers that are all alike; load this model with layout='layers'")
    if not stacked or target().platform == "gpu":
        layers = _cut(weights["layers"], model.num_layers) if stacked else weights["layers"]
        for index, (spec, layer_weights) in enumerate(zip(model.layers, layers, strict=True)):
            group, inner = group_of_layer[index]
            args = (layer_weights, x, caches[group], jnp.int32(inner), rope, metadata[group], scales[group])
            x, caches[group] = run(*args, spec=spec)
    else:

        def body(carry, layer):
            layer_weights, inner = layer
            return run(layer_weights, *carry, inner, rope, metadata[0], scales[0], spec=model.layers[0]), None

        xs = (weights["layers"], jnp.arange(model.num_layers, dtype=jnp.int32))
        (x, caches[0]), _ = lax.scan(body, (x, caches[0]), xs)
    return tuple(caches), rms_norm(x, weights["norm"], model.rms_norm_eps)


def _with_counters(metadata: AttentionMetadata, count: int) -> AttentionMetadata:
    """With the counters that decode attention on a GPU shares out among the layers."""
    if metadata.query_len is None or target().platform != "gpu" or mosaic_unavailable():
        return metadata
    return metadata.replace(counters=jax.new_ref(jnp.zeros(count, jnp.int32)))


def _cut(stacked: dict[str, jax.Array], num_layers: int) -> list[dict[str, jax.Array]]:
    """The weights of each layer, cut out of stacked ones at constant places: XLA's GPU compiler reads such a cut in
    place, where the slice that a scan takes in each turn is a copy of the layer's weights."""
    return [{name: array[i] for name, array in stacked.items()} for i in range(num_layers)]


def logits(model: Model, weights: Any, hidden: Float[Array, "B H"], *, dtype: Any = jnp.float32) -> Float[Array, "B V"]:
    """Output logits, [B, vocab]; ids without a token (a padded vocabulary) get -inf. dtype: of the result; that of
    hidden, in which they are computed, spares whoever reads them from memory a wider copy."""
    head = weights["embed_tokens"] if model.tie_word_embeddings else weights["lm_head"]
    out = linear(hidden, head).astype(dtype)
    if model.num_token_ids is not None and model.num_token_ids < model.vocab_size:
        out = jnp.where(jnp.arange(model.vocab_size) < model.num_token_ids, out, -jnp.inf)
    return out


@functools.partial(jax.jit, static_argnames=("model", "spec", "implementation"))
def _layer(
    w: dict[str, jax.Array],
    x: jax.Array,
    cache: jax.Array,
    layer: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    metadata: AttentionMetadata,
    kv_scales: jax.Array | None,
    *,
    model: Model,
    spec: LayerSpec,
    implementation: Any,
) -> tuple[jax.Array, jax.Array]:
    """One pre-norm layer: attention, then the gated MLP, each added to the residual stream."""
    tokens = x.shape[0]
    h = rms_norm(x, w["input_norm"], model.rms_norm_eps)
    qkv = linear(h, w["qkv"], w.get("qkv_bias")).reshape(tokens, -1, model.head_dim)
    implementation = _thawed(implementation)
    norms = {"q_norm": w["q_norm"], "k_norm": w["k_norm"]} if model.qk_norm else {}
    attended, cache = attention_with_rope(
        qkv,
        cache,
        layer,
        metadata,
        rope if spec.rope else None,
        **norms,
        eps=model.rms_norm_eps,
        scale=model.head_dim**-0.5,
        window=spec.window,
        kv_scales=kv_scales,
        implementation=implementation,
    )
    x = x + linear(attended.reshape(tokens, -1).astype(x.dtype), w["o"], w.get("o_bias"))

    h = rms_norm(x, w["post_norm"], model.rms_norm_eps)
    gate, up = jnp.split(linear(h, w["gate_up"], w.get("gate_up_bias")), 2, axis=-1)
    return x + linear(jax.nn.silu(gate) * up, w["down"], w.get("down_bias")), cache


def _frozen(implementation: Implementation):
    """Hashable form of an implementation choice, for a static argument."""
    return tuple(implementation.items()) if isinstance(implementation, Mapping) else implementation


def _thawed(implementation) -> Implementation:
    return dict(implementation) if isinstance(implementation, tuple) else implementation
