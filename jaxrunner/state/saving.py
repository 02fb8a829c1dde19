"""A whole state in one file: `save_state` and `load_state`.

The file is a safetensors file (https://huggingface.co/docs/safetensors): every leaf of the pytree under its path, in
its own dtype and with its very bits, and beside them what the arrays do not say: groups, names of the columns, versions
and a checksum of each array. Nothing in it is executable.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import Model
from jaxrunner.models.safetensors_file import DTYPES, SafetensorsFile
from jaxrunner.state.alive import check_alive
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.state.fields import RECORD_FIELDS
from jaxrunner.state.kv_dtype import FLOAT8, FLOAT8_BYTES
from jaxrunner.state.kv_dtype import NAMES as CACHE_DTYPES
from jaxrunner.state.reports import Reports
from jaxrunner.state.request_arrays import ArraySet, ArraySets, RequestArray
from jaxrunner.state.request_lists import ListSizes
from jaxrunner.state.runner_state import RunnerState, host_view, init_state
from jaxrunner.state.sampling import ThinkingTokens

FORMAT, FORMAT_VERSION = "jaxrunner.state", "2"
EXTRAS = "extras/"
_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}


def save_state(path: str | Path, state: RunnerState) -> dict[str, int]:
    """Write `state` to `path`, KV cache included, and return the checksum (CRC-32) of each array.

    The file appears under its name when it is complete. Leaves are brought to the host one at a time. Raises
    CheckpointError for a dtype that the format does not have, DonatedStateError for a consumed state.
    """
    check_alive(state)
    path, named = Path(path), leaf_names(state)
    entries, offset = {}, 0
    for name, leaf in named.items():
        dtype = None if _is_key(leaf) else _NAME_OF.get(np.dtype(leaf.dtype))
        if dtype is None:
            raise CheckpointError(f"{path}: {name} has the dtype {leaf.dtype}, which safetensors does not have")
        entries[name] = {"dtype": dtype, "shape": list(leaf.shape), "data_offsets": [offset, offset + leaf.nbytes]}
        offset += leaf.nbytes
    checksums = dict.fromkeys(named, 0)
    header = _header(state, entries, checksums)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(header)
        for name, leaf in named.items():
            data = raw_bytes(leaf)
            checksums[name] = zlib.crc32(data)
            file.write(data)
        # The checksums have a fixed width, so the header keeps its length.
        file.seek(0)
        file.write(_header(state, entries, checksums))
    os.replace(partial, path)
    return checksums


def load_state(path: str | Path, like: Model | RunnerState) -> RunnerState:
    """The state in `path`, as `save_state` wrote it, bit for bit.

    like: the model it is for, or any state of the same kind (arrays or `jax.ShapeDtypeStruct`s), whose shapes, dtypes
    and shardings are then required and used. Raises CheckpointError, naming the file and the array, for a file that is
    damaged, that is no state, or whose state is of another kind than `like`.
    """
    path = Path(path)
    file, metadata = _open(path)
    template = like if isinstance(like, RunnerState) else _template(path, file, metadata, like)
    expected, checksums = leaf_names(template), json.loads(metadata["crc32"])
    if missing := sorted(expected.keys() ^ file.tensors.keys()):
        raise CheckpointError(
            f"{path} and the expected state do not have the same arrays; only one has {', '.join(missing)}"
        )
    if (groups := _groups(metadata)) != template.tables.groups:
        raise CheckpointError(f"{path} has the KV-cache groups {groups}; expected {template.tables.groups}")
    expected_static = {name: getattr(template.sampling, name) for name in ("sizes", "thinking", "reports")}
    if (static := _sampling_static(metadata)) != expected_static:
        raise CheckpointError(f"{path} has a sampler with {static}; expected {expected_static}")
    if (custom := _custom(metadata)) != template.sampling.custom:
        raise CheckpointError(f"{path} has the request arrays {custom}; expected {template.sampling.custom}")
    leaves = []
    for name, leaf in expected.items():
        found = (file.dtype(name), file.tensors[name].shape)
        if found != (np.dtype(leaf.dtype), tuple(leaf.shape)):
            raise CheckpointError(
                f"{path}: {name} is {found[0]}{list(found[1])}; expected {leaf.dtype}{list(leaf.shape)}"
            )
        array = file.read(name)
        if zlib.crc32(raw_bytes(array)) != int(checksums[name], 16):
            raise CheckpointError(f"{path} is damaged: the bytes of {name} do not match their checksum")
        leaves.append(jax.device_put(array, getattr(leaf, "sharding", None)))
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def leaf_names(state: RunnerState) -> dict[str, Any]:
    """Path of each leaf -> leaf, in tree order."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checksums_of(state: RunnerState) -> dict[str, int]:
    """The checksums `save_state` would write."""
    return {name: zlib.crc32(raw_bytes(leaf)) for name, leaf in leaf_names(state).items()}


def raw_bytes(array: jax.Array | np.ndarray) -> memoryview:
    """The bytes of an array in C order; a copy if it is on a device."""
    host = host_view(array) if isinstance(array, jax.Array) else array
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8).data


def saved_checksums(path: str | Path) -> dict[str, int]:
    """The checksums in a file, which is not read any further."""
    return {name: int(value, 16) for name, value in json.loads(_open(Path(path))[1]["crc32"]).items()}


def _header(state: RunnerState, entries: Mapping[str, Any], checksums: Mapping[str, int]) -> bytes:
    import jaxrunner

    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "jaxrunner": jaxrunner.__version__,
        "jax": jax.__version__,
        "groups": json.dumps([dataclasses.asdict(group) for group in state.tables.groups]),
        "lists": json.dumps(dataclasses.asdict(state.sampling.sizes)),
        "thinking": json.dumps(state.sampling.thinking and dataclasses.asdict(state.sampling.thinking)),
        "reports": json.dumps(dataclasses.asdict(state.sampling.reports)),
        "custom": json.dumps([dataclasses.asdict(owned) for owned in state.sampling.custom]),
        "fields": json.dumps([field.name for field in RECORD_FIELDS]),
        "crc32": json.dumps({name: f"{value:08x}" for name, value in checksums.items()}),
    }
    raw = json.dumps({"__metadata__": metadata, **entries}).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _open(path: Path) -> tuple[SafetensorsFile, Mapping[str, str]]:
    try:
        file = SafetensorsFile.open(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not (or no longer) a state that save_state wrote: {error}") from error
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is a safetensors file but holds no state; write one with save_state")
    if metadata["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {metadata['format_version']}; this is {FORMAT_VERSION}")
    if (fields := json.loads(metadata["fields"])) != [field.name for field in RECORD_FIELDS]:
        raise CheckpointError(f"{path} was written by jaxrunner {metadata['jaxrunner']}, whose rows hold {fields}")
    return file, metadata


def _template(path: Path, file: SafetensorsFile, metadata: Mapping[str, str], model: Model) -> RunnerState:
    """Shapes of the state of `model` that has the sizes of the file."""
    groups = _groups(metadata)
    if (layers := sorted(layer for group in groups for layer in group.layers)) != list(range(model.num_layers)):
        raise CheckpointError(f"{path} caches the layers {layers}; this model has {model.num_layers}")
    caches = [f"kv/blocks/{g}" for g in range(len(groups))]
    if absent := {"requests/token_ids", *caches} - file.tensors.keys():
        raise CheckpointError(f"{path} does not have {', '.join(sorted(absent))}")
    rows, max_model_len = file.tensors["requests/token_ids"].shape
    static = _sampling_static(metadata)
    drafts = file.tensors.get("requests/draft_tokens")
    made = jax.eval_shape(
        lambda: init_state(
            model,
            max_requests=rows - 1,
            max_model_len=max_model_len,
            num_blocks=tuple(file.tensors[name].shape[2] for name in caches),
            num_draft_tokens=drafts.shape[1] if drafts else 0,
            kv_cache_dtype=_cache_dtype(path, file, caches[0]),
            groups=groups,
            list_sizes=static["sizes"],
            thinking=static["thinking"],
            reports=static["reports"],
        )
    )
    extras = {
        name.removeprefix(EXTRAS): jax.ShapeDtypeStruct(entry.shape, file.dtype(name))
        for name, entry in file.tensors.items()
        if name.startswith(EXTRAS)
    }
    return made.replace(extras=extras, sampling=made.sampling.replace(custom=_custom(metadata)))


def _cache_dtype(path: Path, file: SafetensorsFile, cache: str) -> str:
    """The `kv_cache_dtype` of a file's cache."""
    dtype = file.dtype(cache)
    if dtype == FLOAT8_BYTES:
        return "fp8"
    if dtype.name not in CACHE_DTYPES or dtype == FLOAT8:
        raise CheckpointError(f"{path}: {cache} is {dtype}, and no KV cache is stored so")
    return dtype.name


def _sampling_static(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The static fields of the `SamplingState`."""
    thinking = json.loads(metadata["thinking"])
    return {
        "sizes": ListSizes(**json.loads(metadata["lists"])),
        "thinking": ThinkingTokens(**thinking) if thinking else None,
        "reports": Reports(**json.loads(metadata["reports"])),
    }


def _custom(metadata: Mapping[str, str]) -> ArraySets:
    return tuple(
        ArraySet(owned["owner"], tuple(RequestArray(**array) for array in owned["arrays"]), owned["every_request"])
        for owned in json.loads(metadata["custom"])
    )


def _groups(metadata: Mapping[str, str]) -> tuple[KVGroup, ...]:
    return tuple(KVGroup(**{**group, "layers": tuple(group["layers"])}) for group in json.loads(metadata["groups"]))


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
