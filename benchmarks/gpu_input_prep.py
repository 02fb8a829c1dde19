"""Input preparation on a GPU: the Mosaic kernel against XLA, checked, then timed.

    python benchmarks/gpu_input_prep.py [--output FILE] [--seconds 120]

Each implementation is first compared, bit for bit, with the NumPy oracle. Then CALLS calls on different requests run
inside one jit, each after the one before, and their kernel times come from `jax.profiler`: `us` is the device time of
one call, all its kernels together; `wall us` is the median time of the whole jit over CALLS, measured apart from the
profiler. A row is void if anything was compiled while it was timed. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxrunner.pallas.input_prep import input_prep_xla  # noqa: E402
from jaxrunner.pallas.input_prep_mosaic import input_prep_mosaic  # noqa: E402
from jaxrunner.pallas.slot_mapping_mosaic import default_tokens_per_cta  # noqa: E402
from jaxrunner.state.fields import REQUEST_COLUMN  # noqa: E402
from tests.oracle import input_prep as oracle  # noqa: E402
from tests.pallas import specs  # noqa: E402

CALLS = 16
WARM_UPS = 3
PROFILED = 5
WALL_RUNS = 30

CASES: tuple[tuple[str, specs.InputPrepSpec, tuple[int, ...]], ...] = (
    ("decode/b64", specs.decode(64), (2, 4)),
    ("decode/b256", specs.decode(256), (2, 4)),
    ("prefill/1x8192", specs.prefill(1, 8192), (2, 4, 16, 32)),
    ("prefill/8x1024", specs.prefill(8, 1024), (2, 4, 16, 32)),
    ("mixed/64+1x2048", specs.mixed(64, 2048), (1, 2, 8, 16)),
)
"""Name, arguments, values of tokens_per_cta to try beside the default."""

compilations: collections.Counter[str] = collections.Counter()


def count_compilations() -> None:
    def listener(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compilations["backend_compile"] += 1

    jax.monitoring.register_event_duration_secs_listener(listener)


def implementation(spec: specs.InputPrepSpec, tokens_per_cta: int | None, name: str):
    if name == "xla":
        return functools.partial(input_prep_xla, **spec.static)
    return functools.partial(input_prep_mosaic, tokens_per_cta=tokens_per_cta, **spec.static)


def check(spec: specs.InputPrepSpec, f, seed: int = 7) -> None:
    """Raises AssertionError unless every output is bit-equal to the oracle."""
    args, numbers = spec.build(seed)
    result = jax.jit(f)(*jax.tree.map(jnp.asarray, args))
    for name, value in oracle.input_prep(**numbers).items():
        got = getattr(result, name)
        for a, b in zip(got, value, strict=True) if isinstance(value, list) else [(got, value)]:
            np.testing.assert_array_equal(np.asarray(a), b, err_msg=name)


def variants(spec: specs.InputPrepSpec, count: int):
    """(idx_mappings, the other arguments): the batch on other state rows each time, so that no call repeats another."""
    args, _ = spec.build()
    rows, counters, num_blocks = args[0], args[3].copy(), args[6].copy()
    live = int(args[2])
    rng = np.random.default_rng(1)
    disjoint = live * count < spec.rows
    pool = rng.permutation(np.arange(1, spec.rows)).astype(np.int32)
    mappings = []
    for i in range(count):
        mapping = rows.copy()
        if disjoint:
            mapping[:live] = pool[i * live : (i + 1) * live]
        else:  # all requests are alike: any row does
            mapping[:live] = rng.permutation(rows[:live])
        mappings.append(mapping)
    columns = [REQUEST_COLUMN[n] for n in ("num_computed_tokens", "prefill_len")]
    source_counters, source_blocks = counters[rows[:live]], num_blocks[rows[:live]]
    if disjoint:
        for mapping in mappings:
            counters[np.ix_(mapping[:live], columns)] = source_counters[:, columns]
            num_blocks[mapping[:live]] = source_blocks
    rest = [*args[1:3], counters, *args[4:6], num_blocks, *args[7:]]
    return [jnp.asarray(m) for m in mappings], jax.tree.map(jnp.asarray, rest)


def repeated(f):
    """CALLS calls in a row; the barrier keeps XLA from merging or sharing parts of them, and costs no kernel."""

    f = jax.jit(f)  # traced and lowered once for all calls

    def run(mappings, rest):
        query_start_loc, num_reqs, *state = rest
        outputs = []
        for mapping in mappings:
            if outputs:
                small = (mapping, query_start_loc, num_reqs, outputs[-1])
                mapping, query_start_loc, num_reqs, outputs[-1] = jax.lax.optimization_barrier(small)
            outputs.append(f(mapping, query_start_loc, num_reqs, *state))
        return outputs

    return jax.jit(run)


def kernel_times(run, *args) -> tuple[float | None, float, list[str]]:
    """(device us of one call, kernels of one call, the names with their share), over PROFILED runs."""
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
    calls = PROFILED * CALLS
    names = [f"{n[:48]} x{number[n] / calls:.2f} {ns / calls / 1e3:.2f}us" for n, ns in total.most_common(6)]
    us = sum(total.values()) / calls / 1e3
    return (us if number else None), sum(number.values()) / calls, names


def wall(run, *args) -> float:
    """Median us of one call, dispatch included."""
    times = []
    for _ in range(WALL_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6 / CALLS


def measure(case: str, spec: specs.InputPrepSpec, name: str, tokens_per_cta: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"kernel/input_prep/{case}", "implementation": name, "value": None, "unit": "us"}
    if name == "mosaic":
        default = default_tokens_per_cta(spec.num_tokens)
        row |= {"tokens_per_cta": tokens_per_cta or default, "default": tokens_per_cta is None}
    try:
        f = implementation(spec, tokens_per_cta, name)
        check(spec, f)
        row["equal_to_oracle"] = True
        args = variants(spec, CALLS)
        run = repeated(f)
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        row["first_call_s"] = round(time.perf_counter() - start, 2)
        for _ in range(WARM_UPS):
            jax.block_until_ready(run(*args))
        before = compilations["backend_compile"]
        row["wall_us"] = round(wall(run, *args), 2)
        value, kernels, names = kernel_times(run, *args)
        if compilations["backend_compile"] != before:
            return row | {"void": "something was compiled in the timed window"}
        row |= {"value": value and round(value, 3), "kernels_per_call": round(kernels, 2), "kernels": names}
        if value is None:
            row["void"] = "the profiler saw no GPU stream"
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


def conditions() -> dict[str, Any]:
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
        "state": specs.MODEL,
        "data": "random, other state rows in every call",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_input_prep.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further row after this long")
    options = parser.parse_args()
    count_compilations()
    jobs = [(c, s, name, None) for c, s, _ in CASES for name in ("mosaic", "xla")]
    jobs += [(c, s, "mosaic", value) for c, s, values in CASES for value in values]
    deadline, rows = time.perf_counter() + options.seconds, []
    result = {"conditions": conditions(), "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for number, (case, spec, name, value) in enumerate(jobs):
        if time.perf_counter() > deadline:
            result["conditions"]["rows_left_out"] = len(jobs) - number
            break
        rows.append(measure(case, spec, name, value))
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    options.output.write_text(json.dumps(result, indent=1) + "\n")

    print(f"\n{result['conditions']['device']}, jax {jax.__version__}; {options.output}")
    print(f"{'case':18s}{'':8s}{'tokens/CTA':>11s}{'us':>9s}{'kernels':>9s}{'wall us':>9s}")
    for row in rows:
        figures = [row.get("value"), row.get("kernels_per_call"), row.get("wall_us")]
        text = "".join(f"{'-' if x is None else f'{x:.2f}':>9s}" for x in figures)
        name = row["name"].removeprefix("kernel/input_prep/")
        note = row.get("error") or row.get("void") or ""
        print(f"{name:18s}{row['implementation']:8s}{row.get('tokens_per_cta', '')!s:>11s}{text}  {note[:80]}")


if __name__ == "__main__":
    main()
