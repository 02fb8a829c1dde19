"""`jaxrunner buckets`: what a model's ladder costs to make, and after a run what it was used for."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxrunner.cli.console import announce_download, command
from jaxrunner.errors import AdmissionError

if TYPE_CHECKING:
    from jaxrunner.compile.ladder import Ladder
    from jaxrunner.compile.table import BucketTable
    from jaxrunner.models.model import Model
    from jaxrunner.runner.config import RunnerConfig

RUNGS = "ascending sizes, e.g. 1,4,16; left out: the default ladder's."


def buckets(
    model: Annotated[
        str | None,
        typer.Option(help="A directory (config.json is enough without --run), a .gguf file or a hub id."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")
    ] = "float32",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the dtype), float32, bfloat16, float16, or fp8.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    max_num_batched_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a step.")] = None,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence.")] = None,
    decode: Annotated[str | None, typer.Option(help=f"Requests of a decode: {RUNGS}")] = None,
    mixed: Annotated[str | None, typer.Option(help=f"Tokens of a ragged step: {RUNGS}")] = None,
    finish: Annotated[str | None, typer.Option(help=f"Requests of a second half: {RUNGS}")] = None,
    tiers: Annotated[str | None, typer.Option(help="Sampler tiers, e.g. greedy,random; left out: all.")] = None,
    run: Annotated[int, typer.Option(min=0, help="Run so many random requests then, for hits and waste.")] = 0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither load nor keep executables.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make every executable of a ladder and show, for each, the seconds to trace, lower, compile or load it, the bytes
    of its code and temporaries, and its use. Without --run no weight is read."""
    rungs = {
        name: _sizes(name, text)
        for name, text in (("decode", decode), ("mixed", mixed), ("finish", finish))
        if text is not None
    }
    with command() as console:
        announce_download(console, model)
        options: dict[str, Any] = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "kv_cache_dtype": kv_cache_dtype,
            "executable_cache": "off" if no_cache else None,
        }
        described, config = _configured(model, dtype, options)
        ladder = _ladder(described, config, rungs, tiers)
        table = _after_a_run(model, dtype, options, ladder, run) if run else _made(described, config, ladder)
        if as_json:
            print(json.dumps(_report(table)))
        else:
            print(table)


def _configured(model: str | None, dtype: str, options: dict[str, Any]) -> tuple[Model, RunnerConfig]:
    from jaxrunner.engine.sizes import runner_config
    from jaxrunner.models.loading import describe

    described = describe(model, dtype=dtype)
    return described, runner_config(described, **options)


def _ladder(model: Model, config: RunnerConfig, rungs: dict[str, tuple[int, ...]], tiers: str | None) -> Ladder:
    from jaxrunner.compile.buckets import TIERS
    from jaxrunner.runner.device_runner import default_ladder

    chosen: dict[str, Any] = dict(rungs)
    if "finish" in chosen:
        chosen["finish_costly"] = ()
    if tiers:
        chosen["tiers"] = tuple(tiers.split(","))
        if unknown := set(chosen["tiers"]) - set(TIERS):
            raise AdmissionError(f"no sampler tier is called {sorted(unknown)}; the tiers are {', '.join(TIERS)}")
    try:
        ladder = dataclasses.replace(default_ladder(model, config), **chosen)
    except ValueError as error:
        raise AdmissionError(str(error)) from error
    if (ladder.max_num_reqs, ladder.max_num_tokens) != (config.max_num_seqs, config.max_num_batched_tokens):
        raise AdmissionError(
            f"the ladder ends at {ladder.max_num_reqs} requests and {ladder.max_num_tokens} tokens, the runner takes "
            f"{config.max_num_seqs} and {config.max_num_batched_tokens}: set --max-num-seqs and "
            "--max-num-batched-tokens to the last rungs"
        )
    return ladder


def _made(model: Model, config: RunnerConfig, ladder: Ladder) -> BucketTable:
    """The whole ladder, from shapes alone."""
    import jax

    from jaxrunner.compile.executable_cache import open_cache
    from jaxrunner.compile.programs import ProgramSet
    from jaxrunner.compile.table import BucketTable
    from jaxrunner.models.weights import abstract_weights
    from jaxrunner.runner.config import empty_state

    state = jax.eval_shape(lambda: empty_state(model, config))
    programs = ProgramSet(model, abstract_weights(model), state, ladder)
    table = BucketTable(programs, cache=open_cache(config.executable_cache))
    table.warm_up(progress=True)
    return table


def _after_a_run(model: str | None, dtype: str, options: dict[str, Any], ladder: Ladder, count: int) -> BucketTable:
    """The table of an engine that has completed `count` requests of random lengths, half of them greedy."""
    import numpy as np

    from jaxrunner import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, ladder=ladder, warm_up=True, **options)
    draw = np.random.default_rng(0)
    longest = llm.runner.config.max_model_len
    lengths = np.exp(draw.uniform(0, np.log(max(longest // 2, 2)), count)).astype(int)
    prompts = [draw.integers(0, llm.model.vocab_size, n).tolist() for n in lengths]
    each = [
        SamplingParams(
            temperature=i % 2 if "random" in ladder.tiers else 0,
            max_tokens=int(draw.integers(1, min(64, longest - n) + 1)),
            ignore_eos=True,
        )
        for i, n in enumerate(lengths)
    ]
    llm.generate(prompts, each)
    return llm.runner.table


def _report(table: BucketTable) -> dict[str, Any]:
    return {
        "ladder": dataclasses.asdict(table.programs.ladder),
        "executables": table.stats(),
        "misses": table.misses,
        "compiled_on_demand": table.compiled_on_demand,
    }


def _sizes(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of sizes like 1,4,16", param_hint=f"--{name}") from None
