"""CPU time of a step of both runners, stage by stage, beside each other and under the same load.

    python benchmarks/two_runners.py [--requests 512 256 64 1024 128] [--seconds 150] [--output FILE] [--plot FILE]

Three contenders: DeviceRunner with input preparation as a Mosaic kernel (on a Hopper GPU) and in XLA, and HostRunner,
which does it in NumPy. Two loads: `decode`, where every request decodes, and `mixed`, where requests of 16 to 160
prompt tokens and 32 to 224 generated ones come as others end, so that a step has decodes, chunks of prompts, admissions
and releases; its rows are of the steps with prompt tokens. The model is so small that the host bounds the step, and the
runners are synchronous: one step is `execute_model` and `sample_tokens`. The contenders take turns of TURN steps, and a
turn is timed between two runs of `benchmarks.calibration`; rows hold medians over the turns in which the CPU was at its
more frequent speed.

A row's `value` is the whole time of the runner, `host_us` that without the calls of executables (`dispatch_us`) and
without waiting for the tokens (`wait_us`, the device's time and the copy). `stages` are the ranges of
`jaxrunner.timing`, and the rest; `upload_us` is what a call takes longer with a NumPy array of the step's size than
with one that is on the device, a part of `dispatch_us`. `scheduler_us` is the engine's and not part of `value`. A row
is void if anything was compiled in its window. `inputs/...`: steps whose prepared inputs were equal bit for bit, after
the requests were brought into one order; of `input_ids`, `differing` are not, since the contenders had sampled other
tokens, and all are those that the contender's scheduler knows.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.calibration import calibrate, speed  # noqa: E402
from benchmarks.two_runners_inputs import Inputs, capture, difference, known_ids, known_tokens  # noqa: E402
from benchmarks.two_runners_plot import draw  # noqa: E402
from jaxrunner import Ladder, RunnerConfig, SamplingParams, StepTimer, build_runner  # noqa: E402
from jaxrunner.compile.counter import CompileCounter  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.models.model import LayerSpec, Model  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402
from jaxrunner.timing.ranges import RANGES  # noqa: E402
from jaxrunner.timing.times import DISPATCH  # noqa: E402

TURN, TURNS, WARM_UP, CHECKED = 16, 8, 24, 6
MAX_MODEL_LEN, BLOCK_SIZE = 512, 16
PROMPT, OUTPUT = (16, 160), (32, 224)
"""Shortest and longest, of the mixed load."""
CALLS = 200
GPU_MODEL = Model(
    "LlamaForCausalLM", 32000, 256, 512, 4, 2, 64, (LayerSpec(),) * 2, max_position_embeddings=8192, dtype="bfloat16"
)
CPU_MODEL = Model("LlamaForCausalLM", 512, 32, 64, 2, 1, 16, (LayerSpec(),), max_position_embeddings=8192)


@dataclasses.dataclass(frozen=True)
class Way:
    """A runner and how it prepares a step's inputs."""

    runner: Any
    preparation: str

    @property
    def name(self) -> str:
        return f"{self.runner}-{self.preparation}"


def ways() -> list[Way]:
    mosaic = [Way("device", "mosaic")] if jax.default_backend() == "gpu" else []
    return [*mosaic, Way("device", "xla"), Way("host", "numpy")]


class Contender:
    """One runner with a scheduler of its own. num_tokens: of each request in the last step.
    upload_words: of the largest step whose inputs were looked at."""

    def __init__(self, way: Way, model: Model, weights: Any, num_reqs: int):
        self.way, self.num_reqs = way, num_reqs
        budget = 2 * num_reqs + 32
        self.config = RunnerConfig(
            num_reqs,
            MAX_MODEL_LEN,
            budget,
            num_reqs * MAX_MODEL_LEN // BLOCK_SIZE + 1,
            BLOCK_SIZE,
            implementation={"input_prep": way.preparation} if way.runner == "device" else None,
            runner=way.runner,
        )
        ladder = Ladder((num_reqs,), (budget,), (num_reqs,), tiers=("greedy",))
        self.runner = build_runner(model, weights, self.config, ladder=ladder)
        self.runner.warm_up()
        self.num_tokens: list[int] = []
        self.is_mixed = False
        self._start_over()

    def _start_over(self) -> None:
        self.scheduler = Scheduler(self.config, len(self.runner.groups), prefix_caching=False)
        self._rng = np.random.default_rng(self.num_reqs)
        self._added = self.upload_words = 0

    def decode(self) -> None:
        """Every request decodes from now on; blocks fill up at different steps."""
        for i in range(self.num_reqs):
            self._add(17 + i % BLOCK_SIZE, MAX_MODEL_LEN - 64)
        while self.num_tokens != [1] * self.num_reqs:
            self.step()

    def mix(self) -> None:
        """Requests come and go from now on; those of the beginning end one after the other."""
        for request in self._requests():
            self.scheduler.abort(request.request_id)
        self.step()
        self._start_over()
        self.is_mixed = True
        for _ in range(self.num_reqs):
            self._add(int(self._rng.integers(*PROMPT)), int(self._rng.integers(1, OUTPUT[1])))
        while self.scheduler.waiting:
            self.step()
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> tuple[int, int]:
        """(ns of the runner, ns of the scheduler) of one step."""
        self._refill()
        begun = time.perf_counter_ns()
        plan, frame = self.scheduler.schedule()
        self.num_tokens = list(plan.num_scheduled_tokens.values())
        planned = time.perf_counter_ns()
        output = self.runner.execute_model(plan)
        if output is None:
            output = self.runner.sample_tokens()
        done = time.perf_counter_ns()
        if plan.total_num_scheduled_tokens:
            self.scheduler.update(frame, output)
        return done - planned, planned - begun + time.perf_counter_ns() - done

    def turn(self) -> Turn:
        before = calibrate()
        with StepTimer(self.runner, capacity=TURN) as timer:
            spent = np.array([self.step() for _ in range(TURN)]) / 1e3
        times, cpu = timer.times, speed(before, calibrate())
        ranges = {name: times.us(name) for name in RANGES}
        # Of the mixed load only steps with pieces of prompts.
        kept = times.num_tokens > times.num_reqs if self.is_mixed else np.full(TURN, True)
        ranges = {name: us[kept] for name, us in ranges.items()}
        return Turn(cpu, spent[kept, 0], spent[kept, 1], times.num_tokens[kept], ranges)

    def inputs(self) -> tuple[Inputs, np.ndarray]:
        """Run a step; what its forward pass was given, and what its input ids have to be."""
        self._refill()
        tokens = known_tokens(self.scheduler)
        with capture(self.runner, self.way.preparation) as seen:
            self.step()
        (inputs,) = seen
        self.upload_words = max(self.upload_words, inputs.upload_words)
        return inputs, known_ids(inputs, tokens)

    def _refill(self) -> None:
        if self.is_mixed:
            for _ in range(self.num_reqs - len(self._requests())):
                self._add(int(self._rng.integers(*PROMPT)), int(self._rng.integers(*OUTPUT)))

    def _requests(self) -> list[Request]:
        return [*self.scheduler.running.values(), *self.scheduler.waiting]

    def _add(self, prompt_len: int, max_tokens: int) -> None:
        self._added += 1
        prompt = [(7 * self._added + j) % 500 for j in range(prompt_len)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add(Request(f"request-{self._added}", prompt, params))


@dataclasses.dataclass(frozen=True)
class Turn:
    """cpu: "fast", "slow" or "mixed". Of each step, runner_us, scheduler_us, and spent: range -> microseconds."""

    cpu: str
    runner_us: np.ndarray
    scheduler_us: np.ndarray
    num_tokens: np.ndarray
    spent: dict[str, np.ndarray]


def measure(contenders: list[Contender], load: str, share: float) -> list[report.Row]:
    """A row for each contender. share: seconds for all of them together."""
    turns: dict[str, list[Turn]] = {c.way.name: [] for c in contenders}
    deadline = time.perf_counter() + share
    with CompileCounter() as counter:
        for number in range(TURNS):
            if number and time.perf_counter() > deadline:
                break
            for contender in contenders:
                turns[contender.way.name].append(contender.turn())
    void = {"void": f"{counter.count} programs were compiled in the timed window"} if counter.count else {}
    usual, _ = collections.Counter(t.cpu for each in turns.values() for t in each).most_common(1)[0]
    return [row_of(c, load, turns[c.way.name], usual) | void for c in contenders]


def row_of(contender: Contender, load: str, turns: list[Turn], usual: str) -> report.Row:
    name = f"two_runners/{load}/r{contender.num_reqs}/{contender.way.name}"
    chosen = [t for t in turns if t.cpu == usual] or turns
    value = np.concatenate([t.runner_us for t in chosen])
    if not len(value):
        return {"name": name, "value": None, "unit": "us", "void": "no step had what is timed"}
    ranges = {each: np.concatenate([t.spent[each] for t in chosen]) for each in RANGES}
    dispatch, wait = sum(ranges[each] for each in DISPATCH), ranges["wait"]
    return {
        "name": name,
        "value": _median(value),
        "unit": "us",
        "p10": round(float(np.percentile(value, 10)), 1),
        "p90": round(float(np.percentile(value, 90)), 1),
        "host_us": _median(value - dispatch - wait),
        "dispatch_us": _median(dispatch),
        "upload_us": upload_us(contender.upload_words),
        "wait_us": _median(wait),
        "scheduler_us": _median(np.concatenate([t.scheduler_us for t in chosen])),
        "stages": {each: _median(us) for each, us in ranges.items()} | {"rest": _median(value - sum(ranges.values()))},
        "steps": len(value),
        "tokens": _median(np.concatenate([t.num_tokens for t in chosen])),
        "cpu": chosen[0].cpu,
        "turns": [[t.cpu, _median(t.runner_us)] for t in turns if len(t.runner_us)],
    }


def _median(values: np.ndarray) -> float:
    return round(float(np.median(values)), 1)


@functools.cache
def upload_us(words: int) -> float:
    """What a call takes longer when one of its arguments, i32[words], is on the host."""
    first = jax.jit(lambda vector: vector[0]).lower(jax.ShapeDtypeStruct((words,), jnp.int32)).compile()
    vectors = [np.zeros(words, np.int32) for _ in range(CALLS)]
    there = jax.device_put(vectors[0])

    def median(arguments) -> float:
        times = []
        for argument in arguments:
            begun = time.perf_counter()
            result = first(argument)
            times.append((time.perf_counter() - begun) * 1e6)
            jax.block_until_ready(result)
        return statistics.median(times)

    median([there] * CALLS)
    return round(median(vectors) - median([there] * CALLS), 1)


def check_inputs(contenders: list[Contender], row: report.Row) -> report.Row:
    """Steps of all contenders beside each other; the first decides what is right, and each what it has sampled."""
    compared = differing = 0
    for number in range(CHECKED):
        (first, ids_of_first), *others = [c.inputs() for c in contenders]
        for contender, (inputs, ids) in zip(contenders[1:], others, strict=True):
            if found := difference(first, inputs, ids_of_first, ids):
                return row | {"void": f"step {number}: {contender.way.name} has other {found}"}
            compared += int(inputs.arrays["query_lens"].sum())
            differing += int((ids != ids_of_first).sum())
    names = [c.way.name for c in contenders]
    return row | {"value": CHECKED, "contenders": names, "input_ids": compared, "differing": differing}


def measure_size(result: report.Report, model: Model, weights: Any, num_reqs: int, share: float, row: report.Row):
    """All rows of a size. share: seconds for the turns of each load."""
    begun = time.perf_counter()
    contenders = [Contender(way, model, weights, num_reqs) for way in ways()]
    for load in ("decode", "mixed"):
        for contender in contenders:
            (contender.decode if load == "decode" else contender.mix)()
        head = {"name": f"two_runners/inputs/{load}/r{num_reqs}", "value": None, "unit": "steps"}
        result.add(check_inputs(contenders, head))
        for each in measure(contenders, load, share):
            result.add(each)
    return row | {"value": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[512, 256, 64, 1024, 128])
    parser.add_argument("--seconds", type=float, default=150, help="no size is begun after that")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "two_runners.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "two_runners.svg")
    options = parser.parse_args()
    model = GPU_MODEL if jax.default_backend() == "gpu" else CPU_MODEL
    conditions = report.conditions(model=f"hidden {model.hidden_size}, {model.num_layers} layers", turn_steps=TURN)
    result = report.Report(options.output, conditions, seconds=options.seconds)
    weights, share = random_weights(model), options.seconds / 5 / len(options.requests)
    for num_reqs in options.requests:
        if not result.left:
            conditions.setdefault("requests_left_out", []).append(num_reqs)
            continue
        shown = len(result.rows)
        row = {"name": f"two_runners/seconds/r{num_reqs}", "value": None, "unit": "s"}
        result.add(report.guarded(row, functools.partial(measure_size, result, model, weights, num_reqs, share, row)))
        report.show(result.rows[shown:], leave_out=("turns", "p10", "p90"))
    result.write()
    draw(result.rows, conditions, options.plot)
    if any("void" in row or "error" in row for row in result.rows):
        sys.exit("a row has no value")


if __name__ == "__main__":
    main()
