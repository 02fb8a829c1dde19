"""`jaxrunner generate`: a prompt in, text out as it comes; or token ids in and one JSON object out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxrunner.cli.console import announce_download, command
from jaxrunner.errors import AdmissionError

if TYPE_CHECKING:
    from jaxrunner.compile.buckets import Tier
    from jaxrunner.engine.llm import LLM
    from jaxrunner.engine.outputs import RequestOutput
    from jaxrunner.sampling_params import SamplingParams
    from jaxrunner.structured_outputs import StructuredOutputsParams

logger = logging.getLogger("jaxrunner")


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to answer, or with --raw to continue.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A directory, a .gguf file or a hub id. Left out: SmolLM2-135M-Instruct, downloaded once."),
    ] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids in place of a text, e.g. 1,2,3.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws when the temperature is above 0.")] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto for the checkpoint's own.")
    ] = "float32",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto (the dtype), float32, bfloat16, float16, or fp8.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Longest sequence, prompt included.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The output is JSON that fits this file's schema.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The output as a whole matches this.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="The output is this or another --choice.")] = None,
    grammar: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="The output fits this file's Lark or GBNF grammar.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the model's end ids.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(help="Time every step: a table on stderr, and this file for Perfetto.", dir_okay=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: token_ids, text, finish_reason.")
    ] = False,
) -> None:
    """Generate text from one prompt, streaming it to stdout. Progress and messages go to stderr."""
    if (prompt is None) == (prompt_ids is None):
        raise typer.BadParameter("give a prompt or --prompt-ids, one of the two")
    structures = {"json": json_schema, "regex": regex, "choice": choice or None, "grammar": grammar}
    structures = {kind: value for kind, value in structures.items() if value is not None}
    if len(structures) > 1:
        raise typer.BadParameter("give one of --json-schema, --regex, --choice and --grammar")
    ids = None if prompt_ids is None else _parse_ids(prompt_ids)
    with command() as console:
        from jaxrunner import LLM, SamplingParams

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            ignore_eos=ignore_eos,
            structured_outputs=_structured_outputs(structures),
        )
        with console.status("loading the model"):
            announce_download(console, model)
            # One sequence at a time: a state of one row, and no bucket for more.
            options = {"max_model_len": max_model_len, "kv_cache_dtype": kv_cache_dtype}
            llm = LLM(model, dtype=dtype, max_num_seqs=1, **options)
            run = _Run(llm, params, _encode(llm, prompt or "", raw) if ids is None else ids)
        with console.status("loading or compiling the executables"):
            run.warm_up()
        with _timed(llm, trace, console):
            for text in run:
                if not as_json:
                    sys.stdout.write(text)
                    sys.stdout.flush()
        last = run.last.outputs[0]
        if as_json:
            result = {"token_ids": last.token_ids, "text": last.text, "finish_reason": last.finish_reason}
            sys.stdout.write(json.dumps(result))
        sys.stdout.write("\n")
        sys.stdout.flush()
        console.print(run.summary(), style="dim", highlight=False)


@contextlib.contextmanager
def _timed(llm: LLM, path: Path | None, console: Console) -> Iterator[None]:
    """With a path: the steps are timed, and then shown as a table and written as a trace."""
    if path is None:
        yield
        return
    from jaxrunner import StepTimer

    with StepTimer(llm.runner) as timer:
        yield
    try:
        timer.times.write_trace(path)
    except OSError as error:
        raise AdmissionError(f"the trace cannot be written to {path}: {error.strerror}") from error
    console.line()
    console.print(timer.times.table())
    console.print(f"{len(timer.times)} steps in {path}; open it with https://ui.perfetto.dev", style="dim")


def _structured_outputs(asked: dict[str, Any]) -> StructuredOutputsParams | None:
    from jaxrunner.structured_outputs import StructuredOutputsParams

    texts: dict[str, Any] = {
        kind: value.read_text() if isinstance(value, Path) else value for kind, value in asked.items()
    }
    return StructuredOutputsParams(**texts) if texts else None


def _encode(llm: LLM, text: str, raw: bool) -> list[int]:
    if llm.tokenizer is None:
        raise AdmissionError("this model has no tokenizer; use --prompt-ids")
    if raw or not llm.tokenizer.chat_template:
        return list(llm.tokenizer.encode(text).ids)
    return list(llm.chat_prompt([{"role": "user", "content": text}]))


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of integers like 1,2,3", param_hint="--prompt-ids") from None


@dataclasses.dataclass
class _Run:
    """One generation; iterating gives the pieces of text, or the ids where the model has no tokenizer."""

    llm: LLM
    params: SamplingParams
    prompt: list[int]
    last: RequestOutput = dataclasses.field(init=False)
    ready_seconds: float = 0.0
    seconds: float = 0.0

    def warm_up(self) -> None:
        """Load or compile what this prompt needs, so that the text does not stop for it later on."""
        from jaxrunner.state.records import check_token_ids

        config = self.llm.runner.config
        check_token_ids(self.prompt, self.llm.model.vocab_size)
        self.llm.grammar(self.params)
        if len(self.prompt) > config.max_model_len:
            return  # it will be refused, with the reason
        started = time.perf_counter()
        programs = self.llm.runner.table.programs
        ladder, budget, tier = programs.ladder, config.max_num_batched_tokens, self._tier()
        chunks = {min(len(self.prompt), budget), len(self.prompt) % budget} - {0, 1}
        rungs = {next(n for n in ladder.mixed if n >= chunk) for chunk in chunks}
        blocks = -(-(len(self.prompt) + (self.params.max_tokens or 0)) // config.block_size)
        needed = [programs.admit_for(len(self.prompt), blocks * config.blocks_per_kv_block)]
        needed += [programs.first(ladder.mixed_bucket(rung, tier)) for rung in sorted(rungs)]
        needed += [programs.finish(1, tier)]
        if self.params.max_tokens != 1:
            has_grammar = self.params.structured_outputs is not None
            needed += [programs.first(ladder.decode_bucket(1, tier), has_grammar=has_grammar)]
        self.llm.runner.warm_up(programs=[program for program in needed if program], progress=_log_ready)
        self.ready_seconds = time.perf_counter() - started

    def __iter__(self) -> Iterator[str]:
        started, shown = time.perf_counter(), 0
        for output in self.llm.stream(self.prompt, self.params):
            self.last = output
            completion = output.outputs[0]
            if self.llm.tokenizer is None:
                yield f"{' ' if len(completion.token_ids) > 1 else ''}{completion.token_ids[-1]}"
            else:
                yield completion.text[shown:]
                shown = len(completion.text)
        self.seconds = time.perf_counter() - started

    def summary(self) -> str:
        count = len(self.last.outputs[0].token_ids)
        speed = f"{count} new in {self.seconds:.2f} s: {count / self.seconds:.1f} tokens/s"
        before = f"and {self.ready_seconds:.1f} s for its executables before that"
        return f"{len(self.prompt)} prompt tokens, {speed} ({before})"

    def _tier(self) -> Tier:
        return self.params.tier


def _log_ready(done: int, total: int, name: str) -> None:
    logger.info("ready: %s (%d of %d)", name, done, total)
