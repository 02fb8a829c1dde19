"""Small checkpoints for the tests: readers and writers that share no code with the package."""

import json
import struct
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TINY = sorted(path.name for path in (GOLDEN / "tiny").iterdir())


def config_of(name, file="config.json"):
    return json.loads((GOLDEN / "tiny" / name / file).read_text())


def write_safetensors(path, tensors, metadata=None, cut=0, extra=b""):
    """tensors: name -> (type, shape, bytes)."""
    header = {} if metadata is None else {"__metadata__": metadata}
    blob = b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + blob + extra
    path.write_bytes(data[: len(data) - cut])


def read_raw(path):
    """name -> (type, shape, bytes) of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {n: (e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])]) for n, e in header.items()}


def read_bf16_as_float32(path):
    """All tensors of a bfloat16 file, widened by shifting their bits."""
    return {
        name: (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        for name, (_, shape, raw) in read_raw(path).items()
    }


def write_directory(directory, config, tensors, files=None):
    """A Hugging Face directory with float32 tensors; files: name -> text."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    raw = {name: ("F32", array.shape, np.asarray(array, np.float32).tobytes()) for name, array in tensors.items()}
    write_safetensors(directory / "model.safetensors", raw)
    for name, text in (files or {}).items():
        (directory / name).write_text(text)
    return directory


def error_message(excinfo, *parts):
    """Assert that the message of an expected error names every part."""
    for part in parts:
        assert str(part) in str(excinfo.value), f"{part!r} is not named in: {excinfo.value}"
