"""One GGUF file: its metadata and tensor directory, checked against the file's length, and dequantised tensors.

`gguf.GGUFReader` takes two seconds for the metadata of a small model, because it makes several NumPy views of every
token string; this reader takes an eighth of a second and refuses truncated files. Block sizes and dequantisation are
those of the `gguf` package. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrunner.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. shape: in NumPy's order (the file stores the innermost dimension first)."""

    type_id: int
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """A checked file. No tensor has been read yet and no file is open."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Read metadata and tensor directory. Raises `CheckpointError` for a truncated, damaged or foreign file."""
        path = Path(path)
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
        try:
            cursor = _Cursor(data.data)
            metadata, directory = _read_header(cursor)
        except (struct.error, ValueError, KeyError, IndexError, OverflowError, MemoryError, RecursionError) as error:
            raise _damaged(path, f"its header cannot be read ({error})") from error
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _damaged(path, f"general.alignment is {alignment!r}")
        base = -(-cursor.position // alignment) * alignment
        tensors, due = {}, 0
        for name, (type_id, shape, offset) in directory.items():
            block, block_bytes = _block(path, name, type_id)
            if math.prod(shape) % block:
                raise _damaged(path, f"tensor {name!r} {list(shape)} is no whole number of blocks of {block}")
            num_bytes = math.prod(shape) // block * block_bytes
            if base + offset + num_bytes > size:
                raise _damaged(path, f"tensor {name!r} ends at byte {base + offset + num_bytes}, the file has {size}")
            # Tensors lie one after the other, as llama.cpp asks for too: a damaged type or shape leaves a gap.
            if offset != due:
                raise _damaged(path, f"tensor {name!r} begins at offset {offset} where {due} is due")
            due = -(-(offset + num_bytes) // alignment) * alignment
            end = base + offset + num_bytes
            tensors[name] = GGUFTensor(type_id, shape, base + offset, num_bytes)
        if tensors and size > max(end, base + due):
            raise _damaged(path, f"its directory describes {end} bytes, the file has {size}")
        return cls(path, metadata, tensors)

    def read(self, name: str) -> np.ndarray:
        """A tensor dequantised to float32, a fresh array."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize, quant_shape_to_byte_shape

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type_id)
        with self.path.open("rb") as file:
            raw = np.fromfile(file, np.uint8, tensor.num_bytes, offset=tensor.begin)
        if raw.size != tensor.num_bytes:
            raise _damaged(self.path, f"tensor {name!r} could not be read to its end")
        plain = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(kind.name)
        if plain is not None:
            return raw.view(plain).reshape(tensor.shape).astype(np.float32, copy=False)
        try:
            return dequantize(raw.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the type {kind.name}, which the gguf package cannot dequantise. "
                "Use a file of another quantisation of the same model."
            ) from error


class _Cursor:
    """Reads little-endian values one after the other; `struct.error` past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        (length,) = self.unpack("Q")
        end = self.position + length
        if end > len(self.data):
            raise ValueError(f"a string of {length} bytes passes the end of the file")
        text = str(self.data[self.position : end], "utf-8")
        self.position = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack(_SCALARS[kind])[0]
        item, length = self.unpack("IQ")
        if length > len(self.data):
            raise ValueError(f"an array of {length} items passes the end of the file")
        if item in _SCALARS:
            return list(self.unpack(f"{length}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(length)]


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, tuple[int, tuple[int, ...], int]]]:
    magic, version = cursor.unpack("4sI")
    if magic != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, where little-endian versions 2 and 3 can be read")
    num_tensors, num_values = cursor.unpack("QQ")
    metadata = {}
    for _ in range(num_values):
        name = cursor.string()
        metadata[name] = cursor.value(cursor.unpack("I")[0])
    tensors = {}
    for _ in range(num_tensors):
        name = cursor.string()
        (rank,) = cursor.unpack("I")
        shape = tuple(reversed(cursor.unpack(f"{rank}Q")))
        type_id, offset = cursor.unpack("IQ")
        if name in tensors:
            raise ValueError(f"tensor {name!r} is listed twice")
        tensors[name] = (type_id, shape, offset)
    return metadata, tensors


def _block(path: Path, name: str, type_id: int) -> tuple[int, int]:
    """Elements and bytes of one block of a quantisation type."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        return GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: tensor {name!r} has the unknown type {type_id}. Update the gguf package, or use another file."
        ) from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, incomplete or no GGUF file: {what}. Download it again.")
