"""The static description of a model: what a step needs to know before it sees a weight.

A `Model` is frozen and hashable, so it can be a static argument of `jax.jit` and a dictionary key. It holds no
arrays. `jaxrunner.models.config` makes one from a checkpoint's configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Layout = Literal["layers", "stacked"]


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of one model.

    `parameters` holds the numbers of the scaling rule under their Hugging Face names (`factor`,
    `original_max_position_embeddings`, ...), sorted by name so that equal rules hash equally.
    """

    theta: float = 10000.0
    rope_type: str = "default"
    parameters: tuple[tuple[str, float | tuple[float, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What differs between the layers of one model.

    window: number of most recent keys a query sees, itself included; None for all of them.
    rope: whether queries and keys are rotated (SmolLM3 leaves every fourth layer unrotated).
    """

    window: int | None = None
    rope: bool = True


@dataclasses.dataclass(frozen=True)
class Model:
    """Architecture of a decoder-only transformer, without weights.

    dtype: name of the dtype of weights and activations (`"float32"`, `"bfloat16"`).
    layout: `"layers"` keeps one dictionary of arrays per layer (fastest on the CPU), `"stacked"` one array per matrix
        with a leading layer axis (fewest leaves; layers that are all alike). Fixed when weights are loaded.
    layers: one `LayerSpec` per layer.
    qk_norm: RMS norm over each head of q and k before the rotation (Qwen3).
    vocab_size: rows of the output projection. Ids from `num_token_ids` on have no token and are never sampled.
    kv_scales: (keys, values) of each layer, the scales that the checkpoint has for an fp8 cache; empty without any. An
        empty state begins with them; the step reads the state's.
    eos_token_ids: ids that end a generation: the union of what the configuration, the generation configuration and
        the tokenizer name, ascending. Set by `jaxrunner.models.loading.load`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec = RopeSpec()
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_token_ids: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    kv_scales: tuple[tuple[float, float], ...] = ()
    dtype: str = "float32"
    layout: Layout = "layers"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """Layer indices of each KV-cache group: layers with the same window share block tables."""
        windows = sorted({layer.window for layer in self.layers}, key=lambda w: (w is not None, w))
        return tuple(tuple(i for i, layer in enumerate(self.layers) if layer.window == w) for w in windows)

    def replace(self, **changes) -> Model:
        return dataclasses.replace(self, **changes)
