"""From a checkpoint's configuration (`config.json` as transformers 4 or 5 writes it) to a `Model`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from jaxrunner.errors import CheckpointError
from jaxrunner.models.fp8_weights import check_quantization
from jaxrunner.models.model import LayerSpec, Layout, Model
from jaxrunner.models.rope_config import rope_from_config

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIZE = 2**31 - 1  # sizes and positions are int32 on the device
MAX_LAYERS = 4096  # a larger number is damage: every layer is a Python object


@dataclasses.dataclass(frozen=True)
class _Family:
    """Defaults of one architecture, those of its transformers configuration class."""

    model_type: str
    max_position_embeddings: int
    rope_theta: float = 10000.0
    num_kv_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family("llama", 2048),
    "MistralForCausalLM": _Family("mistral", 131072, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": _Family("qwen2", 32768, num_kv_heads=32, sliding_window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", 32768, num_kv_heads=32, head_dim=128, sliding_window=4096),
    "SmolLM3ForCausalLM": _Family("smollm3", 32768, 2000000.0, num_kv_heads=4, tie_word_embeddings=True),
}
SWITCHED_WINDOW = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM")  # by `use_sliding_window`


def model_from_config(config: Mapping[str, Any], *, dtype: str = "float32", layout: Layout = "layers") -> Model:
    """The `Model` that a Hugging Face configuration describes.

    config: the parsed `config.json`, of transformers 5 (`rope_parameters`, `dtype`, `layer_types`) or of transformers 4
        (`rope_theta`, `rope_scaling`, `torch_dtype`); never changed.
    dtype: of weights and activations, `"float32"`, `"bfloat16"` or `"float16"`; `"auto"` takes the configuration's own.
    layout: see `Model`.

    Raises `CheckpointError` for an architecture, activation, rotary rule, quantisation or dtype that cannot be run, for
    missing numbers and for numbers that contradict each other.
    """
    architecture = _architecture(config)
    family = FAMILIES[architecture]
    if (quantization := config.get("quantization_config")) is not None:
        check_quantization(quantization)
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported; {architecture} runs with 'silu' only.")

    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = _positive(config, "num_key_value_heads", family.num_kv_heads or num_heads, null=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}: "
            "query heads cannot share key heads evenly. Correct config.json."
        )
    llama_like = architecture in ("LlamaForCausalLM", "SmolLM3ForCausalLM")
    attention_bias = _flag(config, "attention_bias") and architecture != "MistralForCausalLM"
    qwen2 = architecture == "Qwen2ForCausalLM"
    max_positions = _positive(config, "max_position_embeddings", family.max_position_embeddings)
    return Model(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads, family.head_dim),
        layers=_layers(config, architecture, family),
        rope=rope_from_config(config, default_theta=family.rope_theta, max_position_embeddings=max_positions),
        rms_norm_eps=_rms_norm_eps(config),
        max_position_embeddings=max_positions,
        tie_word_embeddings=_flag(config, "tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=qwen2 or attention_bias,
        o_bias=attention_bias and not qwen2,
        mlp_bias=llama_like and _flag(config, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        dtype=resolve_dtype(config, dtype),
        layout=_layout(layout),
    )


def resolve_dtype(config: Mapping[str, Any], dtype: str) -> str:
    """`dtype` checked; `"auto"` becomes the configuration's own dtype (float32 where it names none)."""
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype {dtype!r} is not supported; pass dtype= one of {', '.join(DTYPES)}.")
    return dtype


def _layout(layout: Layout) -> Layout:
    if layout not in ("layers", "stacked"):
        raise CheckpointError(f"layout {layout!r} is unknown; pass 'layers' or 'stacked'.")
    return layout


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or ()
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures must be a list of names, not {names!r}. Correct config.json.")
    for name in names:
        if name in FAMILIES:
            return name
    named = ", ".join(names) if names else f"of model_type {config.get('model_type')!r}"
    raise CheckpointError(
        f"architecture {named} is not supported. Supported: {', '.join(FAMILIES)}. "
        "Use a checkpoint of one of these, or add the family in jaxrunner/models/."
    )


def _positive(config: Mapping[str, Any], key: str, default: int | None = None, null: int | None = None) -> int:
    """The positive integer at `key`: `default` where the key is absent, `null` where its value is null."""
    value = config.get(key, default) if key not in config or config[key] is not None else null
    if value is None:
        raise CheckpointError(f"{key} is missing from the configuration; take config.json from the model's origin.")
    if not _is_number(value) or not 0 < value <= MAX_SIZE or value != int(value):
        raise CheckpointError(f"{key} must be a positive 32-bit integer, not {value!r}. Correct config.json.")
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """The truth value at `key`; a text such as "false" is refused, since it would count as true."""
    value = config.get(key, default)
    if value not in (None, False, True):
        raise CheckpointError(f"{key} must be true or false, not {value!r}. Correct config.json.")
    return bool(value)


def _rms_norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if not _is_number(value) or not 0 <= value < math.inf:
        raise CheckpointError(f"rms_norm_eps must be a number, 0 or more, not {value!r}. Correct config.json.")
    return float(value)


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int, default: int | None) -> int:
    explicit = config.get("head_dim", default)
    if explicit is None:
        if hidden_size % num_heads:
            raise CheckpointError(
                f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_heads} and head_dim is not "
                "given. Add head_dim to config.json (rows of q_proj divided by num_attention_heads)."
            )
        explicit = hidden_size // num_heads
    head_dim = _positive({"head_dim": explicit}, "head_dim")
    if head_dim % 2:
        raise CheckpointError(f"head_dim {head_dim} is odd: rotary embedding needs pairs. Correct config.json.")
    return head_dim


def _layers(config: Mapping[str, Any], architecture: str, family: _Family) -> tuple[LayerSpec, ...]:
    count = _positive(config, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise CheckpointError(f"num_hidden_layers is {count}; at most {MAX_LAYERS} can be run. Correct config.json.")
    window = config.get("sliding_window", family.sliding_window)
    if architecture in SWITCHED_WINDOW and not _flag(config, "use_sliding_window"):
        window = None
    if window is not None:
        window = _positive({"sliding_window": window}, "sliding_window")
    rope = [True] * count
    if architecture == "SmolLM3ForCausalLM":
        interval = _positive(config, "no_rope_layer_interval", 4, null=4)
        given = config.get("no_rope_layers")
        if given is not None:
            _check_length("no_rope_layers", given, count)
        rope = [(i + 1) % interval != 0 for i in range(count)] if given is None else [bool(r) for r in given]
    sliding = _sliding(config, architecture, count, window, rope)
    return tuple(LayerSpec(window if s else None, r) for s, r in zip(sliding, rope, strict=True))


def _sliding(
    config: Mapping[str, Any], architecture: str, count: int, window: int | None, rope: list[bool]
) -> list[bool]:
    """Which layers have the sliding window."""
    types = config.get("layer_types")
    if types is not None:
        _check_length("layer_types", types, count)
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise CheckpointError(
                    f"layer_types holds {kind!r}; supported: full_attention, sliding_attention. Use another checkpoint."
                )
        # In Qwen2, Qwen3 and SmolLM3 `use_sliding_window: false` overrides the list; elsewhere the list needs a window.
        if "sliding_attention" in types and window is None and architecture not in SWITCHED_WINDOW:
            raise CheckpointError("layer_types has sliding_attention but sliding_window is missing. Add it.")
        return [kind == "sliding_attention" and window is not None for kind in types]
    if window is None or architecture == "LlamaForCausalLM":
        return [False] * count
    if architecture == "MistralForCausalLM":
        return [True] * count
    if architecture == "SmolLM3ForCausalLM":
        return [not r for r in rope]
    first = config.get("max_window_layers", 28)
    if not _is_number(first):
        raise CheckpointError(f"max_window_layers must be a number, not {first!r}. Correct config.json.")
    return [i >= first for i in range(count)]


def _check_length(key: str, values: Any, count: int) -> None:
    if not isinstance(values, list | tuple):
        raise CheckpointError(f"{key} must be a list with one entry a layer, not {values!r}. Correct config.json.")
    if len(values) != count:
        raise CheckpointError(f"{key} has {len(values)} entries for {count} layers (num_hidden_layers). Correct it.")
