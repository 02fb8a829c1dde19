"""What the GPU benchmarks share: kernel times from the profiler, wall times, compilations seen, conditions, rows.

A timed function makes CALLS calls inside one jit, each after the one before (`chained`), and takes its kernels' times
from `jax.profiler`: a host clock or a loop around a kernel of microseconds would measure the launch. A row is void if
anything was compiled while it was timed.
"""

from __future__ import annotations

import collections
import json
import platform
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

CALLS = 16
WARM_UPS = 3
PROFILED = 5
WALL_RUNS = 30

compilations: collections.Counter[str] = collections.Counter()


def count_compilations() -> None:
    def listener(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compilations["backend_compile"] += 1

    jax.monitoring.register_event_duration_secs_listener(listener)


def kernel_times(run: Callable[..., Any], *args: Any, calls: int = CALLS) -> tuple[float | None, float, dict[str, Any]]:
    """(device us of one call, kernels of one call, name -> (number, us) of one call) over PROFILED runs."""
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
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6 / calls


def timed(
    row: dict[str, Any], run: Callable[..., Any], args: Sequence[Any], *, calls: int = CALLS, wall_runs: int = WALL_RUNS
) -> dict[str, Any]:
    """The row with `us`, `wall_us`, kernels and what voids it."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    row["first_call_s"] = round(time.perf_counter() - start, 2)
    for _ in range(WARM_UPS):
        jax.block_until_ready(run(*args))
    before = compilations["backend_compile"]
    row["wall_us"] = round(wall(run, *args, calls=calls, runs=wall_runs), 2)
    us, kernels, names = kernel_times(run, *args, calls=calls)
    row |= {"us": us and round(us, 3), "kernels_per_call": round(kernels, 2), "kernels": listed(names)}
    if compilations["backend_compile"] != before:
        row["void"] = "something was compiled in the timed window"
    elif us is None:
        row["void"] = "the profiler saw no GPU stream"
    return row


def guarded(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` returns, or the row with the error."""
    try:
        return measure()
    except Exception as error:
        traceback.print_exc()
        return row | {"error": f"{type(error).__name__}: {str(error)[:300]}"}


class Report:
    """Rows written to a JSON file as they come; `left` is false once the time is over."""

    def __init__(self, path: Path, seconds: float, conditions: dict[str, Any]) -> None:
        self.path, self.deadline = path, time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []
        self.result = {"conditions": conditions, "rows": self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> bool:
        return time.perf_counter() < self.deadline

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


def conditions(**more: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        driver = f"unknown: {error}"
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "nvidia_smi": driver,
        "platform_version": str(getattr(device.client, "platform_version", "")),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "calls_per_jit": CALLS,
        "warm_ups": WARM_UPS,
        "profiled_runs": PROFILED,
        **more,
    }
