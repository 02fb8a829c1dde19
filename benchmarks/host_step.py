"""Host time of one engine step, without the device: the executables are replaced by a stub that answers at once.

    python benchmarks/host_step.py [--requests 8 64 256] [--runner device host] [--output FILE]

Measured is everything the host does for a steady decode: planning, checks, the packed upload, and taking the result.
Also by stage, in microseconds: the runner's ranges, see `jaxrunner.timing.ranges`.
Also counted: Python function calls per step, which must not grow with the number of requests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import conditions, write  # noqa: E402
from jaxrunner import DeviceRunner, HostRunner, Ladder, RunnerConfig, SamplingParams, StepTimer  # noqa: E402
from jaxrunner.compile.entry import Entry  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.models.model import LayerSpec, Model  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402
from jaxrunner.stages.sample import StepOutput  # noqa: E402
from jaxrunner.timing.times import HOST  # noqa: E402

MODEL = Model("LlamaForCausalLM", 512, 32, 64, 2, 1, 16, (LayerSpec(),), max_position_embeddings=4096)
WARM_UP, STEPS = 20, 300
RUNNERS: dict[str, type] = {"device": DeviceRunner, "host": HostRunner}


class _Answer(np.ndarray):
    """Tokens that are already on the host."""

    def copy_to_host_async(self) -> None: ...

    def is_ready(self) -> bool:
        return True


class StubEngine:
    """An engine whose table runs nothing; every request is in steady decode."""

    def __init__(self, num_requests: int, runner_class: type = DeviceRunner):
        budget = 4 * num_requests  # all prompts in one step, so that all requests enter new blocks together
        config = RunnerConfig(num_requests, 2048, budget, num_requests * 129 + 1, 16)
        ladder = Ladder.default(MODEL, max_num_seqs=num_requests, max_num_batched_tokens=budget)
        self.runner = runner_class(MODEL, random_weights(MODEL), config, ladder=ladder)
        self.scheduler = Scheduler(config, 1)
        self.runner.table.call = self._call  # type: ignore[method-assign]
        self.runner.table.compiler.make = lambda program: Entry(program, None)  # type: ignore[method-assign]
        params = SamplingParams(temperature=0.0, max_tokens=None)
        for i in range(num_requests):
            self.scheduler.add(Request(f"request-{i}", [5, 6, 7, i % 500], params))

    def _call(self, entry, *args):
        program = entry.program
        if program.kind == "admit":
            return args[0]
        if program.kind == "begin":
            return args[1], types.SimpleNamespace(last_tokens=None)
        rows = program.size if program.kind == "finish" else program.bucket.num_reqs
        tokens = np.full((rows, 1), 9, np.int32).view(_Answer)
        return args[1], StepOutput(tokens, np.ones(rows, np.int32))

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        self.runner.execute_model(plan)
        self.scheduler.update(frame, self.runner.sample_tokens())


def count_calls(step: Callable[[], object], steps: int = 5) -> float:
    """Python function calls of `step`, the mean over `steps`; those of an engine's step cross no block boundary."""
    calls = 0

    def profile(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    for _ in range(steps):
        step()
    sys.setprofile(None)
    return calls / steps


def steady(engine: StubEngine) -> None:
    """Run until every request decodes and has just entered a new block."""
    for _ in range(WARM_UP):
        engine.step()
    while engine.scheduler.columns.computed[0] % 16 != 1:
        engine.step()


def measure(num_requests: int, runner: str) -> list[dict]:
    engine = StubEngine(num_requests, RUNNERS[runner])
    steady(engine)
    calls = count_calls(engine.step)
    times = []
    for _ in range(STEPS):
        started = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    name = f"host_step/decode/r{num_requests}" + ("" if runner == "device" else f"/{runner}")
    rows = [
        {
            "name": name,
            "value": round(statistics.median(times), 4),
            "unit": "ms",
            "p90": sorted(times)[int(STEPS * 0.9)],
        },
        {"name": f"{name}/python_calls", "value": calls, "unit": "calls"},
    ]
    with StepTimer(engine.runner) as timer:
        for _ in range(STEPS):
            engine.step()
    for stage in (*HOST, "lookup"):
        value, p90 = np.percentile(timer.times.us(stage), [50, 90]).round(1).tolist()
        rows.append({"name": f"{name}/{stage}", "value": value, "unit": "us", "p90": p90})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--runner", nargs="+", choices=RUNNERS, default=["device"])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "host_step.json")
    arguments = parser.parse_args()
    rows = [row for runner in arguments.runner for n in arguments.requests for row in measure(n, runner)]
    write(arguments.output, conditions(steps=STEPS, warm_up_steps=WARM_UP), rows)


if __name__ == "__main__":
    main()
