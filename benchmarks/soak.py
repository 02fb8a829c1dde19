"""A long run of random lives: requests arrive, share prefixes, are preempted, aborted, replaced and finish at random.

    python benchmarks/soak.py [--steps 100000] [--seed 0] [--runner device] [--output FILE]

The model is tiny and random; scheduler and runner are the real ones, one step in flight, with a KV pool too small for
its requests. Counted: programs compiled after warm-up, and greedy requests whose tokens differ from those the same
prompt got when it ran alone at the start; both must be 0. The state is audited every AUDIT_EVERY steps; at the end no
row and no block may be held. Prompts whose best two ids come closer than LEAST_MARGIN are not used, because other
batches may round such a choice the other way.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.report import conditions, write  # noqa: E402
from jaxrunner import DeviceRunner, HostRunner, Ladder, RunnerConfig, SamplingParams  # noqa: E402
from jaxrunner.compile.counter import CompileCounter  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.models.model import LayerSpec, Model  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402

MODEL = Model("LlamaForCausalLM", 256, 32, 64, 2, 1, 16, (LayerSpec(), LayerSpec()), max_position_embeddings=128)
CONFIG = RunnerConfig(
    max_num_seqs=8,
    max_model_len=96,
    max_num_batched_tokens=32,
    num_blocks=28,
    block_size=8,
    async_scheduling=True,
    bucket_policy="refuse",
)
LADDER = Ladder(decode=(4, 8), mixed=(16, 32), finish=(8,))
NUM_PROMPTS, MOST_TOKENS, LEAST_MARGIN = 150, 20, 1e-3
RUNNERS: dict[str, type] = {"device": DeviceRunner, "host": HostRunner}
AUDIT_EVERY, REPORT_EVERY, MOST_WAITING = 1_000, 10_000, 12
KINDS = ({}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "min_tokens": 2}, {"logprobs": 3})


class Soak:
    """An engine with one step in flight, and the random lives of its requests."""

    def __init__(self, seed: int, runner_class: type = DeviceRunner):
        self.rng = np.random.default_rng(seed)
        self.runner = runner_class(MODEL, random_weights(MODEL), CONFIG, ladder=LADDER)
        self.scheduler = Scheduler(CONFIG, 1)
        self.in_flight: deque = deque()
        self.alive: dict[str, Request] = {}
        self.names = (f"r{i}" for i in itertools.count())
        self.counts: Counter[str] = Counter()
        self.expected: dict[tuple[int, ...], list[int]] = {}
        self.prompts: list[list[int]] = []

    def learn(self) -> None:
        """Run every prompt alone and remember its greedy tokens."""
        stems = [self.rng.integers(0, MODEL.vocab_size, 40).tolist() for _ in range(12)]
        while len(self.prompts) < NUM_PROMPTS:
            tail = self.rng.integers(0, MODEL.vocab_size, self.rng.integers(1, 12)).tolist()
            prompt = stems[self.rng.integers(len(stems))][: self.rng.integers(0, 41)] + tail
            params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS, logprobs=2)
            if (tokens := self._alone(Request("alone", prompt, params))) is not None:
                self.prompts.append(prompt)
                self.expected[tuple(prompt)] = tokens
        self.scheduler.weights_changed()  # the soak begins with an empty prefix cache

    def _alone(self, request: Request) -> list[int] | None:
        """Its tokens; None if a choice was too close."""
        margin = np.inf
        self.scheduler.add(request)
        while self.scheduler.has_work:
            plan, frame = self.scheduler.schedule()
            if self.runner.execute_model(plan) is not None:
                continue
            output = self.runner.sample_tokens().get_output()
            if output.sampled_token_ids[0]:
                first, second = output.logprobs.logprobs[0, 1:3]
                margin = min(margin, first - second)
            self.scheduler.update(frame, output)
        return request.output_token_ids if margin > LEAST_MARGIN else None

    def step(self) -> None:
        self._act()
        plan, frame = self.scheduler.schedule()
        self.counts["preemptions"] += len(plan.preempted_req_ids)
        self.counts["prefix hits"] += sum(r.num_computed_tokens > 0 for r in plan.scheduled_new_reqs)
        self.counts["tokens run"] += plan.total_num_scheduled_tokens
        if self.runner.execute_model(plan) is None:
            self.in_flight.append((frame, self.runner.sample_tokens()))
        while self.in_flight and (len(self.in_flight) > 1 or not plan.total_num_scheduled_tokens):
            frame, output = self.in_flight.popleft()
            for request in self.scheduler.update(frame, output.get_output()):
                self._finished(request)

    def drain(self) -> None:
        """To the last token; then nothing may be held."""
        busy, self._act = self._act, lambda: None
        while self.scheduler.has_work or self.in_flight:
            self.step()
        self._act = busy
        self.check()
        self.scheduler.check_idle()
        assert len(self.runner.rows) == 0, "rows are held although no request lives"
        assert not self.alive, f"{len(self.alive)} requests never ended"

    def check(self) -> None:
        """Audit the state. The slices that it takes compile small programs of their own, which are counted apart."""
        with CompileCounter() as compiled:
            self.runner.audit(shared_blocks=True)
        self.counts["compiled by audits"] += compiled.count

    def _act(self) -> None:
        if self.rng.random() < 0.35 and len(self.scheduler.waiting) < MOST_WAITING:
            self._add(next(self.names))
        if self.alive and self.rng.random() < 0.02:
            name = list(self.alive)[self.rng.integers(len(self.alive))]
            kind = ("abort", "resubmit", "replace")[self.rng.integers(3)]
            self.counts[kind] += 1
            if kind == "replace":
                self._add(name, self.scheduler.replace)
                return
            self.scheduler.abort(name)
            del self.alive[name]
            if kind == "resubmit":
                self._add(name)

    def _add(self, name: str, submit=None) -> None:
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        most = int(self.rng.integers(1, MOST_TOKENS + 1))
        kind = KINDS[self.rng.integers(len(KINDS))] if self.rng.random() < 0.5 else {}
        params = SamplingParams(float(self.rng.random() < 0.3), max_tokens=most, seed=int(self.rng.integers(2**40)))
        if most >= kind.get("min_tokens", 0):
            params = dataclasses.replace(params, **kind)
        request = Request(name, prompt, params, priority=int(self.rng.integers(-1, 2)))
        (submit or self.scheduler.add)(request)
        self.alive[name] = request

    def _finished(self, request: Request) -> None:
        del self.alive[request.request_id]
        self.counts["finished"] += 1
        if len(request.output_token_ids) != request.params.max_tokens:
            self.counts["wrong lengths"] += 1
        if request.params.is_greedy:
            self.counts["greedy finished"] += 1
            expected = self.expected[tuple(request.prompt_token_ids)][: request.params.max_tokens]
            self.counts["greedy mismatches"] += request.output_token_ids != expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runner", choices=RUNNERS, default="device")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    arguments = parser.parse_args()
    soak = Soak(arguments.seed, RUNNERS[arguments.runner])
    soak.runner.warm_up()
    soak.learn()
    soak.counts.clear()
    started = time.perf_counter()
    with CompileCounter() as compiled:
        for number in range(1, arguments.steps + 1):
            soak.step()
            if number % AUDIT_EVERY == 0:
                soak.check()
            if number % REPORT_EVERY == 0:
                seconds = time.perf_counter() - started
                found = compiled.count - soak.counts["compiled by audits"]
                print(f"{number} steps, {seconds:.0f} s, {found} compiled, {dict(soak.counts)}", flush=True)
        soak.drain()
    seconds = time.perf_counter() - started
    num_compiled = compiled.count - soak.counts.pop("compiled by audits")
    rows = [
        {"name": "soak/steps", "value": arguments.steps, "unit": "steps", "seconds": round(seconds, 1)},
        {"name": "soak/compiled_after_warm_up", "value": num_compiled, "unit": "programs"},
    ]
    names = (
        "greedy mismatches",
        "wrong lengths",
        *(n for n in soak.counts if n not in ("greedy mismatches", "wrong lengths")),
    )
    rows += [{"name": f"soak/{n.replace(' ', '_')}", "value": soak.counts[n], "unit": ""} for n in names]
    write(arguments.output, conditions(seed=arguments.seed, runner=arguments.runner, audit_every=AUDIT_EVERY), rows)
    if num_compiled or soak.counts["greedy mismatches"] or soak.counts["wrong lengths"]:
        sys.exit("the soak failed")


if __name__ == "__main__":
    main()
