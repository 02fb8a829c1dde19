"""What a bucket costs on a GPU, for `jaxrunner ladder`: step time, seconds to make it, bytes; and a replayed trace.

    python benchmarks/gpu_ladder.py [--output FILE] [--model llama3-8b|tiny] [--trace FILE] [--requests 150]

`decode/...` and `mixed/...`: whole engine steps in one bucket, host included, as `gpu_step.py` times them. Decodes are
measured at two contexts, from which `ns_per_key` of the conditions comes; a ragged step runs fresh prompts. `make_s`
is tracing and compiling, in as many threads as the machine has cores. Variants: `on` has XLA's command buffers, which
is its default, `off` compiles without them.

`start-up/...`: the whole warm-up by the clock, in threads. `timeline/...`: the spans of one decode, medians. The device
is seen from outside: from the launch to the moment when the result is on the host.

`replay/...`: requests of a trace, admitted by a clock that is advanced by the measured steps, so that nobody waits.
`predicted` are the same steps priced from the rows above; `simulated` is the trace served by `jaxrunner.ladder.serving`
without having seen any of it. Both are seconds of all steps, as `value` is.

The file is what `Costs.load` reads; jaxrunner/ladder/measured holds one that is shipped. With `--model tiny
--requests 15` it runs on a CPU in about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report, step_check  # noqa: E402
from benchmarks.gpu_step import BLOCK_SIZE, LLAMA3_8B, TINY, Engine, PrefilledScheduler, seconds_of, void  # noqa: E402
from jaxrunner import Ladder, RunnerConfig, SamplingParams  # noqa: E402
from jaxrunner.compile.counter import CompileCounter  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.ladder.costs import Costs  # noqa: E402
from jaxrunner.ladder.placement import Buckets, place_all  # noqa: E402
from jaxrunner.ladder.recording import StepRecorder  # noqa: E402
from jaxrunner.ladder.serving import Limits, serve  # noqa: E402
from jaxrunner.ladder.trace_csv import read_trace, sample_trace  # noqa: E402
from jaxrunner.ladder.traces import Trace  # noqa: E402
from jaxrunner.models.model import Model  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {"on": {}, "off": {"xla_gpu_enable_command_buffer": ""}}
"""XLA's option is a list of what may enter a command buffer; empty is nothing."""
WARM_UP, STEPS = 6, 24
MIXED_STEPS, MIXED_PROMPT = 5, 512
MANY = 32
"""Requests from which on keys are a measurable part of a decode."""
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is measured of a model. contexts: keys of a request, a token more than whole blocks. kv_tokens: room in the
    cache for each request, on average. fewer: sizes of the variant without command buffers."""

    model: Model
    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    contexts: tuple[int, int]
    max_model_len: int
    kv_tokens: int
    fewer: tuple[tuple[int, ...], tuple[int, ...]]

    def ladder(self, variant: str) -> Ladder:
        decode, mixed = (self.decode, self.mixed) if variant == "on" else self.fewer
        return Ladder(decode, mixed, (decode[-1],), tiers=("greedy",))

    def config(self) -> RunnerConfig:
        blocks = self.decode[-1] * -(-self.kv_tokens // BLOCK_SIZE) + 1
        return RunnerConfig(
            self.decode[-1], self.max_model_len, self.mixed[-1], blocks, BLOCK_SIZE, async_scheduling=True
        )


SHAPES = {
    "llama3-8b": Shape(
        LLAMA3_8B, (1, 8, 32, 64, 128, 256), (64, 256, 1024, 4096), (129, 1009), 4096, 1088, ((1, 64, 256), (4096,))
    ),
    "tiny": Shape(TINY, (1, 4, 8), (16, 64), (17, 65), 256, 256, ((8,), (64,))),
}


class Bench(Engine):
    """An engine with one ladder, all of whose programs are compiled; its scheduler is changed between measurements."""

    def __init__(self, shape: Shape, weights: Any, variant: str):
        super().__init__(shape.model, weights, shape.config(), shape.ladder(variant), prefilled=True)
        self.shape = shape
        self.runner.table.compiler.options = VARIANTS[variant]
        started = time.perf_counter()
        self.runner.warm_up()
        self.warm_up_s = time.perf_counter() - started

    def restart(self, scheduler: type[Scheduler]) -> None:
        """Drop all requests and go on with a scheduler of this kind."""
        for name in list(self.scheduler.running):
            self.scheduler.abort(name)
        while self.in_flight or self.scheduler.has_work:
            self.step()
        self.scheduler = scheduler(self.runner.config, len(self.runner.groups), prefix_caching=False)

    def entry(self, kind: str, size: int) -> Any:
        """The executable of a bucket."""
        found = [e for e in self.runner.table.entries.values() if e.program.num_tokens == size]
        return next(e for e in found if e.program.bucket.kind == kind)


def described(bench: Bench, kind: str, size: int) -> Row:
    entry = bench.entry(kind, size)
    return {
        "make_s": round(entry.lower_seconds + entry.compile_seconds, 2),
        "lower_s": round(entry.lower_seconds, 2),
        "code_bytes": entry.code_bytes,
        "temp_bytes": entry.temp_bytes,
    }


def start_up(bench: Bench, variant: str) -> Row:
    entries = bench.runner.table.entries.values()
    others = [e.lower_seconds + e.compile_seconds for e in entries if e.program.bucket is None]
    return {
        "name": f"start-up/{variant}",
        "value": round(bench.warm_up_s, 2),
        "unit": "s",
        "executables": len(entries),
        "buckets": len(entries) - len(others),
        "other_s": round(statistics.mean(others), 3),
        "largest_temp_bytes": max(e.temp_bytes for e in entries),
    }


def decode(bench: Bench, variant: str, size: int, context: int) -> Row:
    """`size` requests that decode. The context of the row is that in the middle of the timed steps."""
    bench.restart(PrefilledScheduler)
    for i in range(size):
        bench.add([(7 * i + j) % 30000 for j in range(context)], 2 * (WARM_UP + STEPS))
    for _ in range(WARM_UP):
        bench.step()
    with CompileCounter() as counter:
        times = [seconds_of(bench.step) for _ in range(STEPS)]
    row = {"name": f"decode/{variant}/b{size}/ctx{context}", "kind": "decode", "size": size, "variant": variant}
    return (
        row
        | {"context": context + WARM_UP + STEPS // 2, "unit": "ms"}
        | report.milliseconds(times)
        | described(bench, "decode", size)
        | void(counter)
    )


def mixed(bench: Bench, variant: str, size: int) -> Row:
    """Fresh prompts of MIXED_PROMPT tokens, or one shorter one, that fill the bucket; until their tokens are there."""
    bench.restart(Scheduler)
    lengths = [MIXED_PROMPT] * (size // MIXED_PROMPT) or [size]

    def step(seed: int) -> float:
        for prompt in step_check.random_prompts(bench.shape.model, lengths, seed):
            bench.add(prompt, 1)
        return seconds_of(lambda: (bench.step(), bench.step()))  # the second one has nothing to run and waits

    for seed in range(2):
        step(seed)
    with CompileCounter() as counter:
        times = [step(10 + seed) for seed in range(MIXED_STEPS)]
    row = {"name": f"mixed/{variant}/t{size}", "kind": "mixed", "size": size, "variant": variant, "unit": "ms"}
    return row | report.milliseconds(times) | described(bench, "mixed", size) | void(counter)


def timeline(bench: Bench, size: int, context: int) -> Iterator[Row]:
    """Spans of a decode that is waited for, medians of STEPS steps, us."""
    bench.restart(PrefilledScheduler)
    for i in range(size):
        bench.add([i + 1] * context, 2 * (WARM_UP + STEPS))
    marks = []
    for _ in range(WARM_UP + STEPS):
        now = [time.perf_counter()]
        plan, frame = bench.scheduler.schedule()
        now.append(time.perf_counter())
        bench.runner.execute_model(plan)
        now.append(time.perf_counter())
        output = bench.runner.sample_tokens()
        now.append(time.perf_counter())
        result = output.get_output()
        now.append(time.perf_counter())
        bench.scheduler.update(frame, result)
        marks.append([*now, time.perf_counter()])
    us = np.median(np.array(marks[WARM_UP:]) - np.array(marks[WARM_UP:])[:, :1], axis=0) * 1e6
    spans = [
        ("host", name, us[i], us[i + 1])
        for i, name in enumerate(("schedule", "execute_model", "sample_tokens", "wait", "update"))
    ]
    for lane, span, begin, end in [*spans, ("device", "launched until there", us[2], us[4])]:
        yield {
            "name": f"timeline/decode b{size}/{span}",
            "value": round(end - begin, 1),
            "unit": "us",
            "lane": lane,
            "span": span,
            "start_us": round(begin, 1),
            "us": round(end - begin, 1),
        }


def ns_per_key(rows: list[Row]) -> float:
    """By how much a key of context lengthens a decode: the median over the sizes where it can be seen."""
    slopes = []
    decodes = [r for r in rows if r.get("kind") == "decode" and not r.get("void")]
    largest = max(r["size"] for r in decodes)
    for size in {r["size"] for r in decodes if r["size"] >= min(MANY, largest)}:
        few, many = sorted((r for r in decodes if r["size"] == size), key=lambda r: r["context"])
        slopes.append((many["value"] - few["value"]) * 1e6 / (size * (many["context"] - few["context"])))
    return round(max(0.0, statistics.median(slopes)), 3)


def replayed(bench: Bench, trace: Trace, costs: Costs) -> Row:
    """The trace through the engine, and what was to be expected."""
    config, ladder = bench.runner.config, Buckets("measured", bench.runner.ladder)
    bench.restart(Scheduler)
    trace = trace.limited(max_model_len=config.max_model_len)
    prompts = step_check.random_prompts(bench.shape.model, trace.prompt_tokens.tolist())
    clock, waiting, times = 0.0, 0, []
    with StepRecorder(bench.runner) as recorder, CompileCounter() as counter:
        while waiting < len(trace) or bench.scheduler.has_unfinished or bench.in_flight:
            if not bench.scheduler.has_unfinished and not bench.in_flight:
                clock = max(clock, float(trace.arrival_s[waiting]))
            while waiting < len(trace) and trace.arrival_s[waiting] <= clock:
                params = SamplingParams(temperature=0.0, max_tokens=int(trace.output_tokens[waiting]), ignore_eos=True)
                bench.scheduler.add(Request(next(bench.names), prompts[waiting], params))
                waiting += 1
            times.append(seconds_of(bench.step))
            clock += times[-1]
    steps = recorder.steps
    predicted = float(costs.of_placements(place_all(ladder, steps), steps).sum())
    simulated = serve(
        trace, ladder, costs, Limits(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
    )
    total = sum(times)
    return {
        "name": f"replay/{trace.name}/{len(trace)} requests",
        "value": round(total, 3),
        "unit": "s",
        "predicted": round(predicted, 3),
        "predicted_by_measured": round(predicted / total, 4),
        "simulated": round(float(simulated.step_s.sum()), 3),
        "simulated_by_measured": round(float(simulated.step_s.sum()) / total, 4),
        "steps": len(steps),
        "simulated_steps": len(simulated.steps),
        "mean_requests": round(float(steps.num_reqs.mean()), 1),
        "prefill_steps": int((steps.num_prefills > 0).sum()),
        **void(counter),
    }


def measure(shape: Shape, weights: Any, variant: str, result: report.Report, trace: Trace) -> None:
    """All rows of one variant."""
    bench = Bench(shape, weights, variant)
    ladder = bench.runner.ladder
    add(result, lambda: start_up(bench, variant), f"start-up/{variant}")
    for size in ladder.decode:
        for context in shape.contexts:
            add(result, functools.partial(decode, bench, variant, size, context), f"decode/{variant}/b{size}")
    for size in ladder.mixed:
        add(result, functools.partial(mixed, bench, variant, size), f"mixed/{variant}/t{size}")
    if variant != "on":
        return
    start = result.rows[0]
    result.conditions |= {"ns_per_key": ns_per_key(result.rows), "other_s": start.get("other_s", 0.0), "variant": "on"}
    for row in timeline(bench, ladder.decode[len(ladder.decode) // 2], shape.contexts[-1]):
        result.add(row)
    costs = Costs.from_rows(result.rows, result.conditions, name="measured")
    add(result, functools.partial(replayed, bench, trace, costs), f"replay/{trace.name}")


def add(result: report.Report, run: Callable[[], Row], name: str) -> None:
    """Measure a row if there is time for it."""
    if result.left:
        result.add(report.guarded({"name": name, "value": None}, run))
        report.show(result.rows[-1:], leave_out=("kind", "size", "variant", "lower_s"))
    else:
        result.conditions["rows_left_out"] = result.conditions.get("rows_left_out", 0) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "jaxrunner/ladder/measured/h200-llama3-8b.json")
    parser.add_argument("--model", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--trace", type=Path, help="a CSV file of requests; the shipped sample if left out")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--seconds", type=float, default=150, help="no row is begun after so many")
    options = parser.parse_args()
    shape = SHAPES[options.model]
    named = {"model": f"{options.model} shape, random {shape.model.dtype}", "steps": STEPS, "contexts": shape.contexts}
    result = report.Report(options.output, report.conditions(**named), seconds=options.seconds)
    trace = read_trace(options.trace) if options.trace else sample_trace()
    weights = jax.block_until_ready(random_weights(shape.model))
    for variant in VARIANTS:
        measure(shape, weights, variant, result, trace.first(options.requests))
    result.write()
    failed = [row["name"] for row in result.rows if row.get("error") or row.get("void")]
    if failed:
        sys.exit(f"rows without a value: {', '.join(failed)}")


if __name__ == "__main__":
    main()
