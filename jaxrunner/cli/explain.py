"""`jaxrunner explain`: the runner that a policy builds, the way to it, and what reads each field."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxrunner.cli.console import announce_download, command
from jaxrunner.errors import AdmissionError, CheckpointError

if TYPE_CHECKING:
    from jaxrunner.selection.explain import Explanation
    from jaxrunner.selection.facts import Facts

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}


def explain(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A directory (config.json is enough), a .gguf file or a hub id.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="jaxrunner (the default), vllm-0.28 or vllm-0.33; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which runner is built and why: every rule that was asked, and for every field what reads it.

    All further options are fields, as --max-num-seqs 64 or --enable-lora true: options of LLM and RunnerConfig for the
    policy jaxrunner, facts about a configuration (jaxrunner.selection.facts) for vLLM's. A field that nothing reads is
    refused. vLLM's environment variable is --override device (V2) or host (V1). Ends with 1 if the runner that was
    chosen cannot be built.
    """
    given = _parse(context.args)
    with command() as console:
        announce_download(console, model)
        found = [_explained(name, model, given) for name in policy or ["jaxrunner"]]
        if as_json:
            print(json.dumps([_as_data(e) for e in found]))
        else:
            _print(found)
        if any(e.decision.errors for e in found):
            raise typer.Exit(1)


def _parse(arguments: list[str]) -> dict[str, Any]:
    """`--name value` and `--name=value`; values are JSON where they can be, else text."""
    given, rest = {}, list(arguments)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or not (equals or rest):
            raise typer.BadParameter(f"{name!r} is not --name value")
        value = value if equals else rest.pop(0)
        try:
            given[name[2:].replace("-", "_")] = json.loads(value)
        except ValueError:
            given[name[2:].replace("-", "_")] = value
    return given


def _explained(name: str, model: str | None, given: dict[str, Any]) -> Explanation:
    from jaxrunner.selection.explain import explain as walk
    from jaxrunner.selection.facts import Facts

    facts = _facts(model, {k: v for k, v in given.items() if k in Facts.__dataclass_fields__})
    if name != "jaxrunner":
        return walk(name, facts, given)
    from jaxrunner.selection.build import asked_runner

    override, source = asked_runner(given.get("runner"))
    explanation = walk(name, dataclasses.replace(facts, override=override, override_from=source), given)
    errors = _refused(model, given)
    decision = dataclasses.replace(explanation.decision, errors=(*explanation.decision.errors, *errors))
    return dataclasses.replace(explanation, decision=decision)


def _facts(model: str | None, given: dict[str, Any]) -> Facts:
    from jaxrunner.models.default_model import default_model_path
    from jaxrunner.models.generation import read_json
    from jaxrunner.models.gguf_file import GGUFFile
    from jaxrunner.models.gguf_loader import config_from_gguf
    from jaxrunner.models.loading import locate
    from jaxrunner.selection.facts import facts_of

    path = Path(default_model_path()) if model is None else locate(model)
    config = config_from_gguf(GGUFFile.open(path)) if path.is_file() else read_json(path / "config.json")
    return facts_of(config, **{name: _typed(name, value) for name, value in given.items()})


def _typed(name: str, value: Any) -> Any:
    """A fact of the type that its field has."""
    from jaxrunner.selection.facts import RUNNER_NAMES, Facts

    if name == "override" and value not in RUNNER_NAMES:
        raise AdmissionError(f"override is {value!r}; use one of {RUNNER_NAMES}")
    default = Facts.__dataclass_fields__[name].default
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, list) else tuple(str(value).split(","))
    of_none = {"async_scheduling": bool, "draft_max_model_len": int}.get(name, str)
    wanted = of_none if default is None else type(default)
    if type(value) is not wanted:
        raise AdmissionError(f"{name} is {value!r}; it must be a {wanted.__name__}")
    return value


def _refused(model: str | None, options: dict[str, Any]) -> list[str]:
    """Why an engine of these options would not start, as far as its model and configuration tell."""
    from jaxrunner.engine.sizes import runner_config
    from jaxrunner.models.loading import describe
    from jaxrunner.runner.config import RunnerConfig

    try:
        described = describe(model, dtype=options.get("dtype", "float32"))
    except CheckpointError as error:
        return [str(error)]
    sizes = {k: v for k, v in options.items() if k in RunnerConfig.__dataclass_fields__ or k == "kv_bytes"}
    runner_config(described, **sizes)
    return []


def _as_data(explanation: Explanation) -> dict[str, Any]:
    decision, choice = explanation.decision, explanation.async_choice
    return {
        "policy": decision.policy.name,
        "runner": decision.runner,
        "label": decision.label,
        "why": decision.answer.why,
        "visits": [{"question": v.question, "answer": v.answer.why} for v in decision.visits],
        "errors": list(decision.errors),
        "async_scheduling": None if choice is None else dataclasses.asdict(choice),
        "notes": list(explanation.notes),
        "fields": {name: list(places) for name, places in explanation.readers.items()},
    }


def _print(found: list[Explanation]) -> None:
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    for explanation in found:
        for line, style in _lines(explanation):
            console.print(line, style=style, markup=False)
    if unread := _unread_variables():
        console.print(f"set, but read by nothing: {', '.join(unread)}", style="yellow", markup=False)


def _lines(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """(text, style) of each line."""
    decision, choice = explanation.decision, explanation.async_choice
    yield f"policy {decision.policy.name}", "bold"
    for number, visit in enumerate(decision.visits, 1):
        yield f"  {number}. {visit.question}", ""
        yield f"     {visit.answer.why}", "dim"
    silent = choice is not None and decision.runner == "host" and not decision.answer.warned
    yield f"  => {decision.label}{', of which vLLM says nothing' if silent else ''}", "bold"
    yield from ((f"  error: {error}", "bold red") for error in decision.errors)
    yield from ((f"  note: {note}", "yellow") for note in explanation.notes)
    if choice is not None:
        state = {True: "on", False: "off", None: "raises"}[choice.enabled]
        yield f"  async scheduling: {state} ({choice.why})", ""
    yield "fields, and what reads them", "bold"
    width = max(map(len, explanation.readers))
    for name, places in explanation.readers.items():
        if places:
            yield f"  {name:<{width}}  {', '.join(places)}", ""
    if unread := [name for name, places in explanation.readers.items() if not places]:
        yield f"  refused, because nothing reads them: {', '.join(unread)}", ""


def _unread_variables() -> list[str]:
    from jaxrunner.selection.readers import environment_readers

    return sorted(name for name in os.environ if name.startswith("JAXRUNNER_") and name not in environment_readers())
