"""`jaxrunner check-attention`: an attention of the user's own, judged by the specs of the built-in ones."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from jaxrunner.cli.console import command


def check_attention(
    function: Annotated[str, typer.Argument(help="module:function, e.g. my_kernels:attention. No GPU is needed.")],
    only: Annotated[str, typer.Option(help="Only specs with this in their name, e.g. decode or 'head 96'.")] = "",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32, for all specs. Left out: each spec's own.")
    ] = None,
    random: Annotated[int, typer.Option(min=0, help="So many random batches beside the named specs.")] = 0,
    float8: Annotated[bool, typer.Option("--float8", help="Also specs over a float8 cache with kv_scales.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a spec.")] = False,
) -> None:
    """Judge an attention by the specs of the built-in ones, against float64; exit with 1 if any spec fails.

    The function has the arguments of jaxrunner.pallas.attention.attention_xla, which passes:

    (q, blocks, layer, metadata, *, scale, window, soft_cap, sinks), and kv_scales over a float8 cache.
    """
    sys.path.insert(0, os.getcwd())  # as `python -m` would find the user's module
    with command() as console:
        import dataclasses

        from jaxrunner.checks import attention_specs
        from jaxrunner.checks.attention_judge import TOLERANCE, judge
        from jaxrunner.errors import ImplementationError
        from jaxrunner.pallas.custom_attention import check_signature, from_name

        if dtype is not None and dtype not in TOLERANCE:
            raise ImplementationError(f"no spec can have the type {dtype!r}; use one of {', '.join(TOLERANCE)}")
        attend = from_name(function)
        check_signature(attend, **({"kv_scales": None} if float8 else {}))
        specs = [*attention_specs.SMALL, *(attention_specs.FLOAT8 if float8 else ())]
        specs += [attention_specs.random_spec(seed) for seed in range(random)]
        specs = [dataclasses.replace(s, dtype=dtype or s.dtype) for s in specs if only in s.name]
        if not specs:
            raise ImplementationError(f"no spec has {only!r} in its name")
        table, failed = Console(soft_wrap=True, highlight=False), 0
        for spec in specs:
            verdict = judge(attend, spec)
            failed += not verdict.passed
            row = {"spec": spec.name, "dtype": spec.dtype, "pass": verdict.passed, "error": verdict.error}
            if as_json:
                print(json.dumps(row | {"reason": verdict.reason}))
            else:
                _show(table, row, verdict.reason)
        text = f"{len(specs) - failed} of {len(specs)} specs passed"
        console.print(text, style="bold red" if failed else "dim", markup=False, highlight=False)
        if failed:
            raise typer.Exit(1)


def _show(table: Console, row: dict[str, Any], reason: str | None) -> None:
    error = "-" if row["error"] is None else f"{row['error']:.1e}"
    style = None if row["pass"] else "red"
    result = "pass" if row["pass"] else "FAIL"
    line = f"{result}  {row['spec']:<26}{row['dtype']:<10}{error:>8}  {reason or ''}"
    table.print(line.rstrip(), style=style, markup=False)
