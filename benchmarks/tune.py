"""Tunes the sizes of attention on this GPU: `jaxrunner/pallas/tuned/<device>.json`, which the kernels read.

    python benchmarks/tune.py [--seconds 300] [--only TEXT] [--output FILE]

Every candidate's result is first compared with that of the kernel's rule, then both are timed as `gpu_kernels.py` times
them; one that is faster by LEAST_GAIN is written. Sizes of a decode must also be no slower where one request has many
more keys than the others, or a lone one many more (`skewed`), which is what splitting keys is for. Shapes of the file
that are not measured in this run stay in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.gpu_kernels import (  # noqa: E402
    LLAMA,
    OTHER_MODELS,
    Case,
    cache,
    decode_case,
    metadata_of,
    prefill_case,
    time_attention,
)
from benchmarks.report import Report  # noqa: E402
from jaxrunner.pallas import compat, tuned_sizes  # noqa: E402
from jaxrunner.pallas.attention_decode_mosaic import decode_attention, geometry_of, rule_for  # noqa: E402
from jaxrunner.pallas.attention_mosaic import default_tile_kv, shape_of  # noqa: E402
from jaxrunner.pallas.attention_prefill_mosaic import ragged_attention  # noqa: E402
from jaxrunner.pallas.attention_shares import default_splits  # noqa: E402

LEAST_GAIN = 0.02
GAIN = 1 - LEAST_GAIN
MOST_ERROR = 1e-2
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
DECODE: tuple[dict[str, Any], ...] = ({"stages": 2}, {"stages": 3}, {"stages": 4}, {"stages": 6}, {"tile_kv": 128})
PREFILL: tuple[dict[str, Any], ...] = (
    {"ping_pong": False},
    {"tile_kv": 64, "stages": 3},
    {"tile_kv": 64, "stages": 4},
    {"tile_kv": 64, "stages": 2},
)


def candidates(case: Case) -> list[dict[str, Any]]:
    """Sizes to try. Of a decode: numbers of shares from a quarter of the GPU's CTAs to some rounds of them, and tiles
    in flight; what does not fit is refused when it is compiled."""
    if not case.is_decode:
        return list(PREFILL)
    q, blocks = arrays_of(case)
    tile_kv = default_tile_kv(q.shape[2], prefill=False)
    rule = rule_for(geometry_of(q, blocks, tile_kv), len(case.requests), 1)
    shares = default_splits(rule.ctas, rule.at_once)
    found: list[dict[str, Any]] = [
        {"num_splits": n} for n in SPLITS if n != shares and rule.at_once / 4 <= n * rule.ctas <= 5 * rule.at_once
    ]
    usual = ({"stages": rule.stages}, {"tile_kv": tile_kv})
    return found + [sizes for sizes in DECODE if sizes not in usual]


def skewed(case: Case) -> Case:
    """As many keys as in a uniform decode, up to three quarters of them one request's; a lone request is longer."""
    batch, (_, ctx) = len(case.requests), case.requests[0]
    if batch == 1:
        return dataclasses.replace(case, requests=((1, 8 * ctx),))
    longest = min(8 * ctx, batch * ctx * 3 // 4)
    others = (batch * ctx - longest) // (batch - 1)
    return dataclasses.replace(case, requests=((1, longest), *((1, others),) * (batch - 1)))


def cases() -> list[Case]:
    """Decodes of 1024 keys at every rung and a prompt, of the Llama-3-8B shape and of some others."""
    shapes = [LLAMA, *(dict(case.shape) for case in OTHER_MODELS)]
    shapes = [dict(items) for items in dict.fromkeys(tuple(shape.items()) for shape in shapes)]
    found = []
    for shape in shapes:
        found += [decode_case(batch, 1024, "us", **shape) for batch in (32, 64, 1, 8, 16, 128, 4, 2, 256)]
        found.append(prefill_case("prefill/1x4096", ((4096, 4096),), **shape))
    return found


def arrays_of(case: Case) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Queries of one token and a cache of one block, which have the shapes that decide."""
    shape = dict(case.shape)
    tail = (shape["block_size"], shape["num_kv_heads"], shape["head_dim"])
    q = jax.ShapeDtypeStruct((1, shape["num_heads"], shape["head_dim"]), jnp.bfloat16)
    return q, jax.ShapeDtypeStruct((1, 2, 1, *tail), jnp.bfloat16)


def key_of(case: Case) -> str:
    _shape, (q, blocks) = dict(case.shape), arrays_of(case)
    if case.is_decode:
        return tuned_sizes.key_of("attention_decode", batch=len(case.requests), **shape_of(q, blocks, 1))
    return tuned_sizes.key_of("attention_prefill", tokens=case.requests[0][0], **shape_of(q, blocks))


def result_of(case: Case, sizes: dict[str, Any]) -> np.ndarray:
    shape = dict(case.shape)
    attend = decode_attention if case.is_decode else ragged_attention
    tokens = sum(query for query, _ in case.requests)
    q = jax.random.normal(jax.random.key(1), (tokens, shape["num_heads"], shape["head_dim"]), jnp.bfloat16)
    blocks = cache().reshape(cache().shape[0], 2, -1, shape["block_size"], shape["num_kv_heads"], shape["head_dim"])
    f = jax.jit(functools.partial(attend, scale=shape["head_dim"] ** -0.5, **sizes))
    return np.asarray(f(q, blocks, jnp.int32(0), metadata_of(case)[0]), np.float32)


def tune(case: Case) -> dict[str, Any]:
    """A row: the time by the rule, and of each candidate that gave the same result; `best` if one is worth it."""
    row: dict[str, Any] = {"name": key_of(case), "value": None, "unit": "us"}
    other = skewed(case) if case.is_decode else None

    def run() -> dict[str, Any]:
        expected, rule = result_of(case, {}), time_attention(case, {})
        times: dict[str, Any] = {}
        for sizes in candidates(case):
            try:
                result = result_of(case, sizes)
            except Exception as error:  # more shared memory than there is, and the like
                times[json.dumps(sizes)] = f"{type(error).__name__}: {error}"[:120]
                continue
            wrong = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
            timed = time_attention(case, sizes)
            times[json.dumps(sizes)] = timed.get("us") if wrong < MOST_ERROR else f"wrong by {wrong:.2g}"
        found = row | {"value": rule["us"], "candidates": times}
        faster = {sizes: us for sizes, us in times.items() if isinstance(us, float) and us < GAIN * rule["us"]}
        if faster and other is not None:
            limit = time_attention(other, {})["us"] / GAIN
            found["skewed_us"] = {name: time_attention(other, json.loads(name))["us"] for name in faster}
            found["skewed_most_us"] = round(limit, 3)
            faster = {name: us for name, us in faster.items() if found["skewed_us"][name] <= limit}
        if faster:
            best = min(faster, key=faster.__getitem__)
            found |= {"best": json.loads(best), "best_us": faster[best]}
        return found

    return report.guarded(row, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = jax.devices()[0].device_kind
    parser.add_argument("--output", type=Path, default=tuned_sizes.path_of(device))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default="", help="only shapes whose key contains this")
    args = parser.parse_args()
    before = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {}
    tuned_sizes.FOLDER = args.output.parent / "none"  # the rules are what candidates are compared with
    conditions = report.conditions(**report.KERNEL_TIMING)
    rows = Report(args.output.with_suffix(".rows.json"), conditions, seconds=args.seconds)
    for case in cases():
        if args.only in key_of(case) and rows.left:
            with compat.quick_lowering():
                rows.add(tune(case))
    measured = {row["name"] for row in rows.rows if row["value"] is not None}
    sizes = {key: value for key, value in before.get("sizes", {}).items() if key not in measured}
    sizes |= {row["name"]: row["best"] for row in rows.rows if "best" in row}
    content = {"conditions": rows.conditions, "sizes": dict(sorted(sizes.items())), "rows": rows.rows}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    rows.path.unlink()
    print(f"{len(measured)} shapes measured, {len(sizes)} with sizes other than the rule's: {args.output}")


if __name__ == "__main__":
    main()
