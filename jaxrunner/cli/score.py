"""`jaxrunner score`: token ids from a JSON file in, the logits of every position out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxrunner.cli.console import announce_download, command


def score(
    ids: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="JSON file: a list of lists of token ids.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="NumPy .npz file to write: logits_0, logits_1, ...")],
    model: Annotated[
        str | None, typer.Option(help="A directory, a .gguf file or a hub id. Left out: the default model.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")
    ] = "float32",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the dtype), float32, bfloat16, float16, or fp8.")] = "auto",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in one step; bounds the memory on the device.")] = 128,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence allowed.")] = None,
) -> None:
    """Write the float32 logits of every position of given token sequences, one array each (length x vocabulary)."""
    sequences = _read(ids)
    if not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no directory", param_hint="--out")
    with command() as console:
        import numpy as np

        from jaxrunner import load
        from jaxrunner.scoring import score as score_sequences

        announce_download(console, model)
        loaded, weights, _ = load(model, dtype=dtype)
        options: dict[str, Any] = {"max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype}
        logits = score_sequences(loaded, weights, sequences, chunk=chunk, **options)
        with out.open("wb") as file:  # an open file, because savez appends .npz to a name without it
            arrays: dict[str, Any] = {f"logits_{i}": array for i, array in enumerate(logits)}
            np.savez(file, **arrays)
        console.print(
            f"{len(logits)} sequences, {sum(map(len, sequences))} positions: {out}", style="dim", markup=False
        )


def _read(path: Path) -> list[Any]:
    try:
        sequences = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise typer.BadParameter(f"{path} is no JSON file ({error})", param_hint="--ids") from None
    if not isinstance(sequences, list) or not all(isinstance(s, list) for s in sequences):
        raise typer.BadParameter(f"{path} must hold a list of lists of token ids", param_hint="--ids")
    return sequences
