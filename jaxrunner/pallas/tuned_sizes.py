"""Sizes of kernels that were measured to be faster than their rules, by device and shape.

`python benchmarks/tune.py` writes `tuned/<device>.json`, `{"sizes": {kernel and shape: {argument: value}}, ...}`. What
is not there falls to the rule of its kernel.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from jaxrunner.pallas.target import target

FOLDER = Path(__file__).parent / "tuned"


def sizes_for(kernel: str, **shape: Any) -> dict[str, Any]:
    """Keyword arguments of `kernel` that were measured for this shape on the device that is traced for; often none."""
    return dict(_table(path_of(target().kind)).get(key_of(kernel, **shape), {}))


def key_of(kernel: str, **shape: Any) -> str:
    """E.g. "attention_decode batch=64 block_size=16 ..."."""
    return " ".join([kernel, *(f"{name}={value}" for name, value in sorted(shape.items()))])


def path_of(device: str) -> Path:
    """The file of a device by its name in JAX, e.g. "NVIDIA H200"."""
    return FOLDER / (re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") + ".json")


@functools.cache
def _table(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["sizes"] if path.is_file() else {}
