"""Weights from a Hugging Face directory: one `.safetensors` file or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrunner.errors import CheckpointError
from jaxrunner.models.fp8_weights import is_extra, read_weight, scale_of
from jaxrunner.models.kv_scale_tensors import is_kv_scale, read_kv_scales
from jaxrunner.models.model import Model
from jaxrunner.models.safetensors_file import SafetensorsFile
from jaxrunner.models.weights import build_weights, weight_table

INDEX = "model.safetensors.index.json"
HARMLESS_EXTRAS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # computed from the config


def load_weights(model: Model, directory: str | Path) -> dict[str, Any]:
    """The weights of `model` from a directory, as arrays of `model.dtype` in the tree of `weight_table(model)`.

    Every file's header is checked against its length, and every tensor's name, shape and type against the model, before
    any weight is read; `CheckpointError` then names the file and the tensor. Nothing is ever unpickled. A tied model
    loads with or without `lm_head.weight` in the files; one that differs from the embedding is an error. 8-bit floats
    are dequantised with their scales.
    """
    files = find_tensors(Path(directory))
    _check_against_model(model, files, Path(directory))
    return build_weights(model, lambda name: read_weight(name, files))


def load_kv_scales(model: Model, directory: str | Path) -> tuple[tuple[float, float], ...]:
    """`Model.kv_scales` of a directory, see `read_kv_scales`."""
    return read_kv_scales(find_tensors(Path(directory)), model.num_layers)


def find_tensors(directory: Path) -> dict[str, SafetensorsFile]:
    """Which (checked) file of the directory holds each tensor."""
    index = directory / INDEX
    if index.is_file():
        return _sharded(directory, index)
    paths = [directory / "model.safetensors"]
    if not paths[0].is_file():
        paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
        hint = f" ({pickles[0]} is a pickle, which could run code and is never read)" if pickles else ""
        raise CheckpointError(f"{directory} has no .safetensors file{hint}. Convert the checkpoint to safetensors.")
    if len(paths) > 1:
        raise CheckpointError(f"{directory} has {len(paths)} .safetensors files but no {INDEX}. Download it too.")
    file = SafetensorsFile.open(paths[0])
    return dict.fromkeys(file.tensors, file)


def _sharded(directory: Path, index: Path) -> dict[str, SafetensorsFile]:
    try:
        weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        if not all(isinstance(name, str) for name in names):
            raise TypeError("a file name is no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}). Download it again.") from error
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names the file {name!r} outside of its directory. Use another checkpoint.")
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory / name} is missing although {INDEX} names it. Download that file.")
    shards = {name: SafetensorsFile.open(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in shards[name].tensors:
            raise CheckpointError(
                f"{directory / name} lacks tensor {tensor!r}, which {INDEX} puts there. Download both."
            )
    files = {tensor: file for file in shards.values() for tensor in file.tensors}
    return files | {tensor: shards[name] for tensor, name in weight_map.items()}


def _check_against_model(model: Model, files: Mapping[str, SafetensorsFile], directory: Path) -> None:
    wanted = {part.hf_name: part.shape for spec in jax.tree.leaves(weight_table(model)) for part in spec.parts()}
    if missing := [name for name in wanted if name not in files]:
        raise CheckpointError(
            f"{directory} lacks tensor {missing[0]!r} ({len(missing)} missing), which {model.architecture} needs. "
            "Download the checkpoint again, or check that config.json belongs to it."
        )
    tied_head = {"lm_head.weight"} if model.tie_word_embeddings else set()
    for name in files:
        harmless = name in tied_head or name.endswith(HARMLESS_EXTRAS) or is_kv_scale(name)
        harmless = harmless or is_extra(name, files)
        if name not in wanted and not harmless:
            raise CheckpointError(
                f"{files[name].path} holds tensor {name!r}, for which {model.architecture} has no place. "
                "Check that config.json (biases, architecture, number of layers) belongs to this checkpoint."
            )
    for name, shape in wanted.items():
        entry = files[name].tensors[name]
        if entry.shape != shape:
            raise CheckpointError(
                f"{files[name].path}: tensor {name!r} has shape {list(entry.shape)}, config.json asks for "
                f"{list(shape)}. Check that config.json belongs to this checkpoint."
            )
        if not entry.dtype.startswith(("F", "BF")):
            raise CheckpointError(
                f"{files[name].path}: tensor {name!r} has the type {entry.dtype}, which is no floating-point type. "
                "Use the model's unquantised checkpoint."
            )
        files[name].dtype(name)
        scale_of(name, files)
    if tied_head & set(files):
        _check_tied(files)


def _check_tied(files: Mapping[str, SafetensorsFile]) -> None:
    head, embedding = files["lm_head.weight"], files["model.embed_tokens.weight"]
    left, right = head.tensors["lm_head.weight"], embedding.tensors["model.embed_tokens.weight"]
    same = left.dtype == right.dtype and left.shape == right.shape
    if not same or head.read("lm_head.weight").tobytes() != embedding.read("model.embed_tokens.weight").tobytes():
        raise CheckpointError(
            f"{head.path}: lm_head.weight differs from model.embed_tokens.weight although config.json ties them. "
            "Set tie_word_embeddings to false in config.json."
        )
