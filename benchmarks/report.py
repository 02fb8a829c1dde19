"""What all benchmarks share: how a GPU is timed, and the one form in which a result is written and printed.

A file is `{"conditions": {...}, "rows": [{"name", "value", "unit", ...}]}`. A row of a GPU may carry `floor` and `peer`
in its unit, `us`, `wall_us` and kernels of one call, and `void` or `error` with the reason why it has no value.

A timed function makes CALLS calls inside one jit, each after the one before, and takes its kernels' times from
`jax.profiler`: a host clock or a loop around a kernel of microseconds would measure the launch. A row is void if
anything was compiled while it was timed.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CALLS = 16
WARM_UPS = 3
PROFILED = 5
WALL_RUNS = 30
KERNEL_TIMING = {"calls_per_jit": CALLS, "warm_ups": WARM_UPS, "profiled_runs": PROFILED}
"""Conditions of rows that `timed` made."""
Row = dict[str, Any]


# What was measured where.


def conditions(**more: Any) -> dict[str, Any]:
    """Machine and versions, and what the benchmark adds."""
    import jax
    import numpy

    device = jax.devices()[0]
    result = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": numpy.__version__,
    }
    if device.platform == "gpu":
        result |= {"nvidia_smi": _nvidia_smi(), "platform_version": str(device.client.platform_version)}
    return result | more


def _nvidia_smi() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


# Rows: kept, written, printed.


class Report:
    """Rows written to a JSON file as they come; `left` is false once the time is over."""

    def __init__(self, path: Path, conditions: dict[str, Any], *, seconds: float = float("inf")) -> None:
        self.path, self.deadline = path, time.perf_counter() + seconds
        self.conditions = conditions
        self.rows: list[Row] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> bool:
        return time.perf_counter() < self.deadline

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps({"conditions": self.conditions, "rows": self.rows}, indent=1) + "\n")


def write(path: Path, conditions: dict[str, Any], rows: list[Row]) -> None:
    """Write the file and print the table."""
    report = Report(path, conditions)
    report.rows += rows
    report.write()
    show(rows)


def show(rows: Sequence[Row], *, leave_out: Sequence[str] = ()) -> None:
    """Print the table: name, value and unit, then every other entry that is short. leave_out: entries not printed."""
    width = max((len(row["name"]) for row in rows), default=0) + 2
    for row in rows:
        hidden = {"name", "value", "unit", *leave_out}
        extra = "  ".join(f"{k} {_short(v)}" for k, v in row.items() if k not in hidden and v is not None)
        print(f"{row['name']:<{width}}{_short(row.get('value')):>10} {row.get('unit', ''):<8}{extra}".rstrip())


def _short(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "/".join(f"{k}={_short(v)}" for k, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:120]


def guarded(row: Row, measure: Callable[[], Row]) -> Row:
    """What `measure` returns, or the row with the error."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


# Kernel times on a GPU.


def kernel_times(run: Callable[..., Any], *args: Any, calls: int = CALLS) -> tuple[float | None, float, dict[str, Any]]:
    """(device us of one call, kernels of one call, name -> (number, us) of one call) over PROFILED runs."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                jax.block_until_ready(run(*args))
        path = next(Path(folder).rglob("*.xplane.pb"))
        profile = jax.profiler.ProfileData.from_file(str(path))
        total: collections.Counter[str] = collections.Counter()
        number: collections.Counter[str] = collections.Counter()
        for plane in profile.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    total[event.name] += event.duration_ns
                    number[event.name] += 1
    count = PROFILED * calls
    names = {name: (number[name] / count, ns / count / 1e3) for name, ns in total.most_common(6)}
    us = sum(total.values()) / count / 1e3
    return (us if number else None), sum(number.values()) / count, names


def listed(names: dict[str, Any]) -> list[str]:
    """The kernels of `kernel_times`, for a row."""
    return [f"{name[:48]} x{number:.2f} {us:.2f}us" for name, (number, us) in names.items()]


def wall(run: Callable[..., Any], *args: Any, calls: int = CALLS, runs: int = WALL_RUNS) -> float:
    """Median us of one call, dispatch included."""
    import jax

    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6 / calls


def timed(
    row: Row, run: Callable[..., Any], args: Sequence[Any], *, calls: int = CALLS, wall_runs: int = WALL_RUNS
) -> Row:
    """The row with `us`, `wall_us`, kernels and what voids it."""
    import jax

    from jaxrunner.compile.counter import CompileCounter

    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    row["first_call_s"] = round(time.perf_counter() - start, 2)
    for _ in range(WARM_UPS):
        jax.block_until_ready(run(*args))
    with CompileCounter() as compiled:
        row["wall_us"] = round(wall(run, *args, calls=calls, runs=wall_runs), 2)
        us, kernels, names = kernel_times(run, *args, calls=calls)
    row |= {"us": us and round(us, 3), "kernels_per_call": round(kernels, 2), "kernels": listed(names)}
    if compiled.count:
        row["void"] = f"{compiled.count} programs were compiled in the timed window"
    elif us is None:
        row["void"] = "the profiler saw no GPU stream"
    return row


def milliseconds(times: Sequence[float]) -> Row:
    """`value`, `p10` and `p90` of times in seconds."""
    ordered = sorted(t * 1e3 for t in times)
    tenth = len(ordered) // 10
    return {
        "value": round(statistics.median(ordered), 3),
        "p10": round(ordered[tenth], 3),
        "p90": round(ordered[-1 - tenth], 3),
    }
