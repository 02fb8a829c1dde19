"""The one table of a model's weights, and everything that is derived from it.

`weight_table` gives, in the tree that the weights have, one `WeightSpec` per array: shape, logical axes, the checkpoint
tensors its rows come from, and how to draw it at random. Abstract weights, random weights and the loaders' plan follow
from it, so a family is described in one place.

    {"embed_tokens": [vocab, hidden], "layers": ..., "norm": [hidden], "lm_head": [vocab, hidden] unless tied}

`layers` is a tuple of one dictionary per layer, or in the stacked layout one dictionary of arrays with a leading layer
axis. Matrices are `[out, in]` as in checkpoints; `qkv` has the rows of all query heads, then key, then value heads;
`gate_up` those of gate, then up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.models.host_buffers import HostBuffers, host_buffers_help
from jaxrunner.models.model import Model

Init = Literal["normal", "norm", "bias"]


class Part(NamedTuple):
    """One checkpoint tensor and the place it fills: `array[place] = tensor`."""

    hf_name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One array of the weights.

    shape: with the leading layer axis where `axes[0]` is `"layers"`.
    axes: logical axis names, one per dimension.
    hf_names: checkpoint tensors that are its rows, in order; of a stacked array layer after layer.
    init: `"normal"` (variance 1 / fan-in), `"norm"` (around 1) or `"bias"` (around 0).
    rows: rows that each tensor of one layer fills.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_names: tuple[str, ...]
    init: Init
    rows: tuple[int, ...]

    def parts(self) -> Iterator[Part]:
        """The plan that fills this array from checkpoint tensors."""
        stacked = self.axes[0] == "layers"
        trailing = self.shape[2:] if stacked else self.shape[1:]
        starts = np.cumsum((0, *self.rows))
        for i, name in enumerate(self.hf_names):
            layer, part = divmod(i, len(self.rows))
            rows = slice(int(starts[part]), int(starts[part + 1]))
            yield Part(name, (self.rows[part], *trailing), (layer, rows) if stacked else (rows,))


def weight_table(model: Model) -> dict[str, Any]:
    """One `WeightSpec` per array, in the tree of the weights of `model`."""
    vocab_hidden = ((model.vocab_size, model.hidden_size), ("vocab", "hidden"))
    prefixes = [f"model.layers.{i}." for i in range(model.num_layers)]
    per_layer = [_layer_table(model, prefix) for prefix in prefixes]
    table: dict[str, Any] = {
        "embed_tokens": WeightSpec(*vocab_hidden, ("model.embed_tokens.weight",), "normal", (model.vocab_size,)),
        "layers": _stack(per_layer) if model.layout == "stacked" else tuple(per_layer),
        "norm": WeightSpec((model.hidden_size,), ("hidden",), ("model.norm.weight",), "norm", (model.hidden_size,)),
    }
    if not model.tie_word_embeddings:
        table["lm_head"] = WeightSpec(*vocab_hidden, ("lm_head.weight",), "normal", (model.vocab_size,))
    return table


def _layer_table(model: Model, prefix: str) -> dict[str, WeightSpec]:
    hidden, mlp = model.hidden_size, model.intermediate_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    table = {}

    def vector(key: str, name: str, size: int, axis: str) -> None:
        table[key] = WeightSpec((size,), (axis,), (f"{prefix}{name}.weight",), "norm", (size,))

    def linear(key: str, names: str, rows: tuple[int, ...], columns: int, axes: tuple[str, str], bias: bool) -> None:
        parts = [prefix + name for name in names.split()]
        weights, biases = (tuple(f"{part}.{kind}" for part in parts) for kind in ("weight", "bias"))
        table[key] = WeightSpec((sum(rows), columns), axes, weights, "normal", rows)
        if bias:
            table[f"{key}_bias"] = WeightSpec((sum(rows),), axes[:1], biases, "bias", rows)

    vector("input_norm", "input_layernorm", hidden, "hidden")
    projections = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    linear("qkv", projections, (q, kv, kv), hidden, ("qkv", "hidden"), model.qkv_bias)
    if model.qk_norm:
        vector("q_norm", "self_attn.q_norm", model.head_dim, "head_dim")
        vector("k_norm", "self_attn.k_norm", model.head_dim, "head_dim")
    linear("o", "self_attn.o_proj", (hidden,), q, ("hidden", "heads"), model.o_bias)
    vector("post_norm", "post_attention_layernorm", hidden, "hidden")
    linear("gate_up", "mlp.gate_proj mlp.up_proj", (mlp, mlp), hidden, ("gate_up", "hidden"), model.mlp_bias)
    linear("down", "mlp.down_proj", (hidden,), mlp, ("hidden", "mlp"), model.mlp_bias)
    return table


def _stack(layers: list[dict[str, WeightSpec]]) -> dict[str, WeightSpec]:
    """One table of arrays with a leading layer axis."""
    return {
        key: dataclasses.replace(
            spec,
            shape=(len(layers), *spec.shape),
            axes=("layers", *spec.axes),
            hf_names=tuple(name for layer in layers for name in layer[key].hf_names),
        )
        for key, spec in layers[0].items()
    }


def abstract_weights(model: Model) -> dict[str, Any]:
    """`jax.ShapeDtypeStruct` of every array, for compiling and for sizing memory without weights."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, model.dtype), weight_table(model))


def random_weights(model: Model, seed: int = 0) -> dict[str, Any]:
    """Weights of a sane scale: matrices N(0, 1/fan_in), norms N(1, 0.1^2), biases N(0, 0.1^2), in `model.dtype`.

    A value depends on the seed and on its checkpoint tensor only, so both layouts hold the same numbers.
    """
    key = jax.random.key(seed)
    layer_keys = sorted(weight_table(model.replace(layout="stacked"))["layers"])

    def draw(path: tuple[Any, ...], spec: WeightSpec) -> jax.Array:
        names = [getattr(entry, "key", getattr(entry, "idx", None)) for entry in path]
        if names[0] != "layers":
            number = ("embed_tokens", "norm", "lm_head").index(names[0])
            return _draw(jax.random.fold_in(key, number), spec, model.dtype)
        leaf = jax.random.fold_in(key, 3 + layer_keys.index(names[-1]))
        if model.layout == "layers":
            return _draw(jax.random.fold_in(leaf, names[1]), spec, model.dtype)
        single = dataclasses.replace(spec, shape=spec.shape[1:])
        return jnp.stack([_draw(jax.random.fold_in(leaf, i), single, model.dtype) for i in range(model.num_layers)])

    return jax.tree_util.tree_map_with_path(draw, weight_table(model))


def _draw(key: jax.Array, spec: WeightSpec, dtype: str) -> jax.Array:
    scale = 0.1 if spec.init in ("norm", "bias") else spec.shape[-1] ** -0.5
    return _normal(key, scale, float(spec.init == "norm"), shape=spec.shape, dtype=dtype)


def _normal_impl(key: jax.Array, scale: float, mean: float, *, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (mean + scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


_normal = jax.jit(_normal_impl, static_argnames=("shape", "dtype"))


def build_weights(model: Model, read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """The weights of `model` from `read(hf_name)`, one checkpoint tensor at a time.

    Each array is filled in a fresh buffer of its final dtype and then handed to JAX, which on a CPU keeps the buffer
    itself; nothing writes to it afterwards. The peak is the weights plus one array and one checkpoint tensor.
    """
    table, dtype = weight_table(model), jnp.dtype(model.dtype)
    shapes = [spec.shape for spec in jax.tree.leaves(table)]
    host = HostBuffers(shapes, dtype) if host_buffers_help() else None

    def build(spec: WeightSpec) -> jax.Array:
        buffer = np.empty(spec.shape, dtype) if host is None else host.empty(spec.shape)
        for part in spec.parts():
            np.copyto(buffer[part.place], read(part.hf_name), casting="unsafe")
        return jax.device_put(buffer, may_alias=True)

    return jax.tree.map(build, table)


def parameter_bytes(model: Model) -> int:
    """Bytes that the weights of `model` take."""
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(abstract_weights(model)))
