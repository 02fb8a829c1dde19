"""`jaxrunner ladder`: the sizes of a rule, and ladders compared, fitted and reported on for a load. Needs no JAX."""

from __future__ import annotations

import csv
import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from jaxrunner.cli.console import command
from jaxrunner.errors import AdmissionError

if TYPE_CHECKING:
    from jaxrunner.ladder.costs import Costs
    from jaxrunner.ladder.serving import Limits
    from jaxrunner.ladder.steps import Steps
    from jaxrunner.ladder.study import Study
    from jaxrunner.ladder.traces import Trace

app = typer.Typer(
    name="ladder", help="Padded sizes: of a rule, compared, fitted and reported on.", no_args_is_help=True
)

MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Requests in a step.")]
Budget = Annotated[int, typer.Option("--max-num-batched-tokens", min=1, help="Tokens in a step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[
    str,
    typer.Option(
        "--trace",
        help="A CSV file of requests (Azure's or BurstGPT's columns) or of recorded steps; or poisson, bursty or "
        "diurnal for a generated trace. Left out: a small sample that comes with the package.",
    ),
]
Rate = Annotated[float, typer.Option(help="Requests a second of a generated trace.")]
Requests = Annotated[int, typer.Option(min=1, help="Requests of a trace, at most.")]
Seed = Annotated[int, typer.Option(help="Of a generated trace.")]
CostsOf = Annotated[
    str, typer.Option(help="Measured buckets: a file of benchmarks/gpu_ladder.py, a shipped name, or 'tokens'.")
]
ModeName = Annotated[str, typer.Option(help="vLLM's CUDA-graph mode.")]
Release = Annotated[str, typer.Option(help="Whose dispatch: 0.28 or 0.33.")]
Own = Annotated[Path | None, typer.Option(help="One more ladder, a file of Ladder.save.")]
Captured = Annotated[str, typer.Option(help="CUDA-graph capture sizes of your own, e.g. 1,2,4,8,16.")]
SAMPLE, GENERATED = "sample", ("poisson", "bursty", "diurnal")


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """What `compare` and `report` take alike: a load, the limits of an engine, prices, and ladders."""

    trace: Source = SAMPLE
    rate: Rate = 15.0
    requests: Requests = 2000
    seed: Seed = 0
    max_num_seqs: MaxNumSeqs = 256
    max_num_batched_tokens: Budget = 8192
    costs: CostsOf = "h200-llama3-8b"
    graph_costs: CostsOf = "h200-vllm"
    mode: ModeName = "FULL_AND_PIECEWISE"
    release: Release = "0.33"
    ladder: Own = None
    capture_sizes: Captured = ""

    def study(self) -> Study:
        """Raises AdmissionError where an option names something unknown."""
        from jaxrunner.compile.ladder import Ladder
        from jaxrunner.ladder.dispatch import RELEASES, Mode
        from jaxrunner.ladder.placement import Buckets
        from jaxrunner.ladder.rules import vllm_user_sizes
        from jaxrunner.ladder.study import study

        if self.mode not in Mode.__members__:
            raise AdmissionError(f"unknown mode {self.mode!r}; use one of {', '.join(Mode.__members__)}")
        release = next((r for r in RELEASES if r == self.release), None)
        if release is None:
            raise AdmissionError(f"unknown release {self.release!r}; use one of {', '.join(RELEASES)}")
        try:
            captured = [int(n) for n in self.capture_sizes.split(",")] if self.capture_sizes else []
        except ValueError:
            raise AdmissionError(f"--capture-sizes {self.capture_sizes!r} are no numbers with commas between") from None
        prices = _costs(self.costs)
        return study(
            _source(self.trace, self.rate, self.requests, self.seed),
            limits=_limits(self.max_num_seqs, self.max_num_batched_tokens),
            costs=prices,
            graph_costs=_costs(self.graph_costs) if prices.unit == "s" else prices,
            mode=Mode[self.mode],
            release=release,
            capture_sizes=vllm_user_sizes(captured, max_num_batched_tokens=self.max_num_batched_tokens) or None,
            ladders=[Buckets(self.ladder.stem, Ladder.load(self.ladder))] if self.ladder else [],
        )


def with_study_options(run: Callable[..., None]) -> Callable[..., None]:
    """`run(options, ...)` as a command that has each field of StudyOptions as an option beside its own: typer reads
    options from a signature only."""
    fields, keyword = dataclasses.fields(StudyOptions), inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(StudyOptions, include_extras=True)
    own = list(inspect.signature(run, eval_str=True).parameters.values())[1:]
    shared = [inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in fields]

    @functools.wraps(run)
    def call(**values: Any) -> None:
        chosen = {f.name: values.pop(f.name) for f in fields}
        run(StudyOptions(**chosen), **values)

    parameters = [*shared, *(p.replace(kind=keyword) for p in own)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


@app.command()
def sizes(
    rule: Annotated[str, typer.Option(help="vllm, vllm-v1, powers-of-two, 1.5-steps, linear or jaxrunner.")] = "vllm",
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: Budget = 8192,
    spec_tokens: Annotated[int, typer.Option(min=0, help="Drafts of a request (vLLM's rules).")] = 0,
    blackwell: Annotated[bool, typer.Option("--blackwell", help="vLLM's larger cap of the compute family 10.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the sizes that a rule gives."""
    with command():
        from jaxrunner.ladder import rules

        cap = rules.VLLM_CAP_BLACKWELL if blackwell else rules.VLLM_CAP
        if rule in ("vllm", "vllm-v1"):
            captured = rules.vllm_sizes(
                max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, num_spec_tokens=spec_tokens, cap=cap
            )
            if rule == "vllm-v1":
                captured = rules.v1_draft_multiples(captured, spec_tokens + 1, max_size=captured[-1])
            lists = {"capture sizes": captured}
        elif spec_tokens or blackwell:
            raise AdmissionError(f"--spec-tokens and --blackwell are for vLLM's rules, not for {rule!r}")
        else:
            ladder = rules.ladder_by_rule(
                rule, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            )
            lists = {"decode": ladder.decode, "mixed": ladder.mixed}
        if as_json:
            print(json.dumps(lists))
            return
        for name, values in lists.items():
            print(f"{name}, {len(values)}: {' '.join(map(str, values))}")


@app.command()
@with_study_options
def compare(options: StudyOptions, as_json: AsJson = False) -> None:
    """Compare every rule, vLLM's CUDA graphs and fitted ladders on the second half of a load."""
    with command():
        made = options.study()
        if as_json:
            print(json.dumps({"ladders": made.comparison.rows(), "pairs": made.pair_rows()}))
            return
        print(f"{made.title}: {len(made.first)} steps to fit on, {len(made.second)} to judge on\n")
        print(made.comparison.table())
        print(f"\neach rule against a fitted ladder of as many buckets\n\n{made.pairs_table()}")


@app.command()
def optimal(
    buckets: Annotated[int, typer.Option(min=2, help="Rungs of decodes and of ragged steps together.")],
    trace: Source = SAMPLE,
    rate: Rate = 15.0,
    requests: Requests = 2000,
    seed: Seed = 0,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: Budget = 8192,
    costs: CostsOf = "h200-llama3-8b",
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the ladder, for Ladder.load.")] = None,
) -> None:
    """Fit a ladder to the first half of a load and judge it on the second."""
    with command():
        from jaxrunner.ladder.fitting import fit_ladder
        from jaxrunner.ladder.placement import Buckets
        from jaxrunner.ladder.replay import Comparison, replay
        from jaxrunner.ladder.rules import OWN, ladder_by_rule
        from jaxrunner.ladder.serving import steps_of

        limits, prices = _limits(max_num_seqs, max_num_batched_tokens), _costs(costs)
        sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        own = Buckets(OWN, ladder_by_rule(OWN, **sizes))
        timed = prices if prices.unit == "s" else _costs("h200-llama3-8b")
        first, second = steps_of(_source(trace, rate, requests, seed), own, timed, limits).halves()
        ladder = fit_ladder(first, buckets, prices, **sizes).ladder
        print(f"decode, {len(ladder.decode)}: {' '.join(map(str, ladder.decode))}")
        print(f"mixed, {len(ladder.mixed)}: {' '.join(map(str, ladder.mixed))}\n")
        fitted = Buckets(f"fitted, {buckets}", ladder)
        print(Comparison("second half", tuple(replay(second, s, prices) for s in (own, fitted))).table())
        if output is not None:
            ladder.save(output)


@app.command()
@with_study_options
def report(
    options: StudyOptions,
    output: Annotated[Path, typer.Option(dir_okay=False, help="HTML file to write.")],
    hours: Annotated[float, typer.Option(min=0.01, help="How long an engine serves this load.")] = 1.0,
) -> None:
    """Write one self-contained HTML page: the comparison, the fitted ladders, pictures, and the measurements behind."""
    if not output.parent.is_dir():
        raise typer.BadParameter(f"{output.parent} is no directory", param_hint="--output")
    with command() as console:
        from jaxrunner.ladder.html import write_page

        made = options.study()
        write_page(made, output, horizon_s=hours * 3600)
        console.print(f"{output}: {output.stat().st_size / 1e6:.1f} MB", style="dim", markup=False)


def _limits(max_num_seqs: int, max_num_batched_tokens: int) -> Limits:
    from jaxrunner.ladder.serving import Limits

    return Limits(max_num_seqs, max_num_batched_tokens)


def _costs(name: str) -> Costs:
    from jaxrunner.ladder.costs import Costs

    return Costs.tokens() if name == "tokens" else Costs.load(name)


def _source(name: str, rate: float, requests: int, seed: int) -> Trace | Steps:
    from jaxrunner.ladder.steps import read_steps
    from jaxrunner.ladder.trace_csv import read_trace, sample_trace
    from jaxrunner.ladder.traces import Trace

    if name == SAMPLE:
        return sample_trace()
    if name in GENERATED:
        return getattr(Trace, name)(rate, requests, seed=seed)
    path = Path(name)
    if not path.is_file():
        raise AdmissionError(f"{name} is no file; use a CSV file or one of {', '.join(GENERATED)}")
    with path.open(newline="", encoding="utf-8-sig") as file:
        columns = next(csv.reader(file), [])
    if "num_reqs" in columns:
        return read_steps(path)
    return read_trace(path, max_requests=requests)
