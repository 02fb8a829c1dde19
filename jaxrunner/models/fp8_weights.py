"""Checkpoints in 8-bit floats: float8_e4m3 matrices with scales beside them, dequantised while they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.safetensors_file import SafetensorsFile

SCALES = ("_scale", "_scale_inv")  # after the name of a weight; both multiply
UNUSED = (".input_scale", ".output_scale")  # of activations, which stay unquantised here
BLOCK = 128
"""Rows and columns of a block where a scale belongs to a block."""


def check_quantization(quantization: Any) -> None:
    """Raises `CheckpointError` unless a `quantization_config` describes weights that can be dequantised as they are
    read: `fp8`, or `compressed-tensors` whose groups are all 8-bit floats. How activations were to be quantised is
    ignored: they are not."""
    method = quantization.get("quant_method", "unnamed") if isinstance(quantization, Mapping) else quantization
    if method == "fp8":
        return
    if method == "compressed-tensors":
        groups = quantization.get("config_groups")
        kinds = [g.get("weights") for g in groups.values()] if isinstance(groups, Mapping) else [None]
        if all(isinstance(k, Mapping) and (k.get("type"), k.get("num_bits")) == ("float", 8) for k in kinds):
            return
        method = f"compressed-tensors, {quantization.get('format')}"
    raise CheckpointError(
        f"quantization_config: the checkpoint is quantised with {method!r}, which cannot be read. "
        "Use the unquantised or an fp8 checkpoint of the same model, or a GGUF file of it."
    )


def scale_of(name: str, files: Mapping[str, SafetensorsFile]) -> str | None:
    """The tensor that scales the 8-bit weight `name`; None for a weight of another type.

    Raises `CheckpointError` for an 8-bit weight without a scale and for a scale of a shape that does not fit it.
    """
    file = files[name]
    entry = file.tensors[name]
    if not entry.dtype.startswith("F8"):
        return None
    scale = next((name + suffix for suffix in SCALES if name + suffix in files), None)
    if scale is None:
        raise CheckpointError(
            f"{file.path}: tensor {name!r} has the type {entry.dtype} but no scale ({name}{SCALES[0]}). "
            "Download the checkpoint again."
        )
    shape = files[scale].tensors[scale].shape
    if math.prod(shape) != 1 and shape not in _shapes(entry.shape):
        raise CheckpointError(
            f"{files[scale].path}: tensor {scale!r} has shape {list(shape)}; a weight of {list(entry.shape)} has one "
            f"scale, one for each row, or one for each block of {BLOCK} x {BLOCK}. Use another checkpoint."
        )
    return scale


def is_extra(name: str, files: Mapping[str, SafetensorsFile]) -> bool:
    """Whether a tensor only says how an 8-bit weight of the same module was quantised."""
    for suffix in (*(f".weight{s}" for s in SCALES), *UNUSED):
        if name.endswith(suffix):
            weight = name.removesuffix(suffix) + ".weight"
            return weight in files and files[weight].tensors[weight].dtype.startswith("F8")
    return False


def read_weight(name: str, files: Mapping[str, SafetensorsFile]) -> np.ndarray:
    """A weight as the file has it, or dequantised to float32."""
    weight, scale = files[name].read(name), scale_of(name, files)
    if scale is None:
        return weight
    factors = files[scale].read(scale).astype(np.float32)
    weight = weight.astype(np.float32)
    if factors.size == 1:
        return weight * factors.reshape(())
    if factors.shape in _shapes(weight.shape)[:2]:
        return weight * factors.reshape(-1, 1)
    rows, columns = weight.shape
    return weight * factors.repeat(BLOCK, axis=0)[:rows].repeat(BLOCK, axis=1)[:, :columns]


def _shapes(weight: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Shapes of a scale for each row, and for each block."""
    return (weight[:1], (*weight[:1], 1), tuple(-(-n // BLOCK) for n in weight))
