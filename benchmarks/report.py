"""What a benchmark writes: `{"conditions": {...}, "rows": [{"name", "value", "unit", ...}]}`; it prints the same."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def conditions(**more: Any) -> dict[str, Any]:
    """Machine and versions, and what the benchmark adds."""
    import jax
    import numpy

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": numpy.__version__,
        **more,
    }


def write(path: Path, conditions: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the file and print the table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")
    for row in rows:
        extra = "  ".join(f"{k} {_short(v)}" for k, v in row.items() if k not in ("name", "value", "unit"))
        print(f"{row['name']:<44}{_short(row['value']):>12} {row['unit']:<8}{extra}")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
