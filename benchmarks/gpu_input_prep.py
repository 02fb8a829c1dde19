"""Input preparation on a GPU: the Mosaic kernel against XLA, checked, then timed.

    python benchmarks/gpu_input_prep.py [--output FILE] [--seconds 120]

Each implementation is first compared, bit for bit, with the NumPy oracle. Then CALLS calls on different requests run
inside one jit, each after the one before, and their kernel times come from `jax.profiler`: `us` is the device time of
one call, all its kernels together; `wall us` is the median time of the whole jit over CALLS, measured apart from the
profiler. A row is void if anything was compiled while it was timed. Rows are written as they come.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.report import CALLS  # noqa: E402
from jaxrunner.pallas.input_prep import input_prep_xla  # noqa: E402
from jaxrunner.pallas.input_prep_mosaic import input_prep_mosaic  # noqa: E402
from jaxrunner.pallas.slot_mapping_mosaic import default_tokens_per_cta  # noqa: E402
from jaxrunner.state.fields import REQUEST_COLUMN  # noqa: E402
from tests.oracle import input_prep as oracle  # noqa: E402
from tests.pallas import specs  # noqa: E402

CASES: tuple[tuple[str, specs.InputPrepSpec, tuple[int, ...]], ...] = (
    ("decode/b64", specs.decode(64), (2, 4)),
    ("decode/b256", specs.decode(256), (2, 4)),
    ("prefill/1x8192", specs.prefill(1, 8192), (2, 4, 16, 32)),
    ("prefill/8x1024", specs.prefill(8, 1024), (2, 4, 16, 32)),
    ("mixed/64+1x2048", specs.mixed(64, 2048), (1, 2, 8, 16)),
)
"""Name, arguments, values of tokens_per_cta to try beside the default."""


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


def measure(case: str, spec: specs.InputPrepSpec, name: str, tokens_per_cta: int | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"kernel/input_prep/{case}", "implementation": name, "value": None, "unit": "us"}
    if name == "mosaic":
        default = default_tokens_per_cta(spec.num_tokens)
        row |= {"tokens_per_cta": tokens_per_cta or default, "default": tokens_per_cta is None}

    def run() -> dict[str, Any]:
        f = implementation(spec, tokens_per_cta, name)
        check(spec, f)
        row["equal_to_oracle"] = True
        report.timed(row, repeated(f), variants(spec, CALLS))
        us = row.pop("us")
        return row if "void" in row else row | {"value": us}

    return report.guarded(row, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_input_prep.json")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no further row after this long")
    options = parser.parse_args()
    jobs = [(c, s, name, None) for c, s, _ in CASES for name in ("mosaic", "xla")]
    jobs += [(c, s, "mosaic", value) for c, s, values in CASES for value in values]
    data = {"state": specs.MODEL, "data": "random, other state rows in every call"}
    result = report.Report(options.output, report.conditions(**report.KERNEL_TIMING, **data), seconds=options.seconds)
    for number, (case, spec, name, value) in enumerate(jobs):
        if not result.left:
            result.conditions["rows_left_out"] = len(jobs) - number
            break
        result.add(measure(case, spec, name, value))
    result.write()
    report.show(result.rows, leave_out=("kernels", "first_call_s", "default"))


if __name__ == "__main__":
    main()
