"""Scales of an fp8 KV cache that a checkpoint carries, under the names that vLLM reads."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.safetensors_file import SafetensorsFile

_OF_LAYER = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.)?(?P<plain>kv?|v)_scale|(?P<projection>[kv])_proj\.(?:(?P=projection)_scale|output_scale))"
)
_OF_QUERIES = re.compile(r"model\.layers\.\d+\.self_attn\.(?:attn\.|q_proj\.)?(?:q|prob)_scale")


def is_kv_scale(name: str) -> bool:
    """Whether a tensor scales the KV cache, or the queries and probabilities beside it, which stay unquantised here."""
    return bool(_OF_LAYER.fullmatch(name) or _OF_QUERIES.fullmatch(name))


def read_kv_scales(files: Mapping[str, SafetensorsFile], num_layers: int) -> tuple[tuple[float, float], ...]:
    """(keys, values) of each layer, 1 where a layer has none or a negative one (not calibrated); () without any.

    A `kv_scale` is for both. Raises CheckpointError for a layer that the model does not have, for more than one scale
    of a layer, and for one that is zero, infinite or NaN.
    """
    found: dict[tuple[int, str], float] = {}
    for name, file in files.items():
        if (match := _OF_LAYER.fullmatch(name)) is None:
            continue
        layer, value = int(match[1]), file.read(name).astype(np.float32)
        if layer >= num_layers or value.size != 1:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} of shape {list(value.shape)} must be one number for one of "
                f"{num_layers} layers. Use another checkpoint."
            )
        scale = float(value.reshape(()))
        if not np.isfinite(scale) or scale == 0:
            raise CheckpointError(f"{file.path}: tensor {name!r} is {scale}, which cannot scale a KV cache.")
        for which in match["plain"] or match["projection"]:
            found[layer, which] = scale if scale > 0 else 1.0
    if not found:
        return ()
    return tuple((found.get((i, "k"), 1.0), found.get((i, "v"), 1.0)) for i in range(num_layers))
