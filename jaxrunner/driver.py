"""The version of NVIDIA's kernel driver, which is there also when JAX cannot use it."""

from __future__ import annotations

from pathlib import Path

FILE = Path("/proc/driver/nvidia/version")


def driver_version() -> str | None:
    """E.g. "580.159.04", or None where no driver shows itself."""
    if not FILE.is_file():
        return None
    return next((word for word in FILE.read_text().split() if word[0].isdigit() and "." in word), None)
