"""One `.safetensors` file: its header, checked against the file's length, and exact reads of single tensors.

The `safetensors` package reads through NumPy's own dtypes and so has neither bfloat16 nor 8-bit floats there; the
format is small enough to read directly (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrunner.errors import CheckpointError

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the format


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: dtype as the file names it, shape, first byte of the file and one past its last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    """A checked file. No tensor has been read yet and no file is open."""

    path: Path
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Read the header and check it against the file's length before anything is allocated for a tensor.

        Raises `CheckpointError` naming the file (and the tensor) for a file that is truncated, has bytes too many, or
        whose header is damaged.
        """
        path = Path(path)
        size = path.stat().st_size
        if not path.is_file():
            raise _damaged(path, "it is no file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _damaged(path, f"its header of {length} bytes does not fit into the file of {size} bytes")
            raw = file.read(length)
        try:
            header = json.loads(raw)
            metadata = header.pop("__metadata__", None) or {}
            entries = {name: _entry(value, 8 + length) for name, value in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _damaged(path, f"its header cannot be read ({error})") from error
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end or entry.end < entry.begin:
                raise _damaged(path, f"tensor {name!r} begins at byte {entry.begin} where {end} is due")
            end = entry.end
            if entry.dtype in DTYPES and end - entry.begin != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
                raise _damaged(path, f"tensor {name!r} {entry.dtype}{list(entry.shape)} has {end - entry.begin} bytes")
        if end != size:
            raise _damaged(path, f"its header describes {end} bytes, the file has {size}")
        return cls(path, entries, metadata)

    def dtype(self, name: str) -> np.dtype:
        """The NumPy dtype of a tensor; `CheckpointError` for a type that NumPy and ml_dtypes do not have."""
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the type {entry.dtype}, which is not supported. "
                f"Supported: {', '.join(DTYPES)}. Use the model's unquantised checkpoint."
            )
        return DTYPES[entry.dtype]

    def read(self, name: str) -> np.ndarray:
        """A fresh array with the very bytes of the file."""
        entry, dtype = self.tensors[name], self.dtype(name)
        with self.path.open("rb") as file:
            raw = np.fromfile(file, np.uint8, entry.end - entry.begin, offset=entry.begin)
        if raw.size != entry.end - entry.begin:
            raise _damaged(self.path, f"tensor {name!r} could not be read to its end")
        return raw.view(dtype).reshape(entry.shape)


def _entry(value: Mapping[str, Any], base: int) -> TensorEntry:
    begin, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)):
        raise ValueError("a size or an offset is no natural number")
    return TensorEntry(str(value["dtype"]), shape, base + begin, base + end)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or incomplete: {what}. Download it again.")
