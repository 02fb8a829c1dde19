"""`jaxrunner doctor`: what this machine can run, and why it cannot run the rest."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxrunner import __version__
from jaxrunner.driver import driver_version

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin", "triton", "jax-triton")


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show devices, versions, which implementation of each op runs here and why, the default model, and memory."""
    report = examine()
    if as_json:
        print(json.dumps(report))
        return
    console = Console(soft_wrap=True, highlight=False)
    for title, rows in _sections(report):
        console.print(title, style="bold")
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            console.print(f"  {name:<{width}}  {value}", markup=False)


def examine() -> dict[str, Any]:
    """The report as plain data."""
    return {
        "jaxrunner": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda_driver": driver_version(),
        **_devices(),
        "implementations": _implementations(),
        "default_model": _default_model(),
        "host_memory_bytes": _host_memory(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:  # a platform that was asked for and cannot start
        return {"backend": None, "backend_error": str(error), "devices": []}
    return {
        "backend": jax.default_backend(),
        "backend_error": None,
        "devices": [
            {
                "id": device.id,
                "kind": device.device_kind,
                "compute_capability": getattr(device, "compute_capability", None),
                "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            }
            for device in devices
        ],
    }


def _implementations() -> dict[str, Any]:
    """Per op: the automatic choice, and each implementation with None or the reason why it cannot run here."""
    from jaxrunner.pallas import compat, implementation, triton_compat

    def reason(name: str) -> str | None:
        return {"mosaic": compat.refusal, "triton": triton_compat.refusal}.get(name, lambda: None)()

    try:
        return {
            op: {"automatic": implementation.best(op), "unavailable": {name: reason(name) for name in names}}
            for op, names in implementation.AVAILABLE.items()
        }
    except RuntimeError:  # no backend; `backend_error` says why
        return {}


def _default_model() -> dict[str, Any]:
    from jaxrunner.models.default_model import NAME, cache_directory

    path = cache_directory() / NAME
    return {"path": str(path), "cached": path.is_file()}


def _host_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _sections(report: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    versions = [("jaxrunner", report["jaxrunner"]), ("python", report["python"])]
    versions += [(name, version or "not installed") for name, version in report["versions"].items()]
    versions.append(("CUDA driver", report["cuda_driver"] or "not visible"))
    devices = [
        (f"{report['backend']}:{d['id']}", f"{d['kind']}, {_gib(d['memory_bytes'])}") for d in report["devices"]
    ] or [("none", report["backend_error"] or "")]
    ops = []
    for op, entry in report["implementations"].items():
        lines = [f"{entry['automatic']} is used"]
        lines += [f"{name}: {why}" for name, why in entry["unavailable"].items() if why]
        ops.append((op, "; ".join(lines)))
    model = report["default_model"]
    state = "cached at" if model["cached"] else "not downloaded yet; it will go to"
    return [
        ("Versions", versions),
        ("Devices", [*devices, ("host memory", _gib(report["host_memory_bytes"]))]),
        ("Implementations of the ops", ops or [("unknown", "no backend could start")]),
        ("Default model", [("SmolLM2-135M-Instruct", f"{state} {model['path']}")]),
    ]


def _gib(count: int | None) -> str:
    return "memory unknown" if count is None else f"{count / 2**30:.1f} GiB"
