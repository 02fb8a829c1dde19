"""Everything that decides an executable, as text: two keys are equal only if the executables are interchangeable."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from jaxrunner.driver import driver_version

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton")
SOURCES = Path(__file__).parents[1]
_NO_INFLUENCE = ("cache", "log", "traceback", "explain", "dump", "color", "leak", "garbage", "check_proxy")
"""Parts of the names of JAX's settings that say nothing about what is compiled."""


@dataclasses.dataclass(frozen=True)
class Key:
    """program: its readable name. parts: what decides it, by name, as JSON types."""

    program: str
    parts: dict[str, Any] = dataclasses.field(hash=False)

    @functools.cached_property
    def digest(self) -> str:
        text = json.dumps([self.program, self.parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def environment() -> dict[str, Any]:
    """What decides every executable of this process: sources, versions, driver, device, processor, settings of JAX and
    of XLA."""
    device = target_device()
    return {
        "source": source_digest(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "driver": driver_version(),
        "platform": f"{device.client.platform} {device.client.platform_version}",
        "device": {
            "id": device.id,
            "kind": device.device_kind,
            "capability": str(getattr(device, "compute_capability", "")),
            "cores": getattr(device, "core_count", None),
        },
        "processor": processor_digest(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": {
            name: repr(value)
            for name, value in sorted(jax.config.values.items())
            if not any(part in name for part in _NO_INFLUENCE)
        },
    }


def target_device() -> jax.Device:
    """The device that a program without shardings runs on."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]


@functools.cache
def source_digest(root: Path = SOURCES) -> str:
    """Of every Python file of the package and every size that was tuned: a version number alone would take edited
    sources for released ones."""
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.glob("pallas/tuned/*.json")]):
        digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def processor_digest() -> str:
    """Of the host's instruction set and number of cores: code for the CPU is made for both."""
    lines = [platform.machine(), str(os.cpu_count())]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        lines.append(platform.processor())
    else:
        first = text.partition("\n\n")[0].splitlines()
        lines += [line for line in first if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
