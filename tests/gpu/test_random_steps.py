"""On a GPU: 500 random engine steps with the kernels compile nothing, pass their audits and repeat exactly."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque

import numpy as np
import pytest

from jaxrunner import DeviceRunner, Ladder, RunnerConfig, SamplingParams
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.compile.hlo import mosaic_kernels
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import random_weights
from jaxrunner.state.audit import audit

pytestmark = pytest.mark.gpu
MODEL = Model(
    "LlamaForCausalLM", 512, 256, 512, 4, 2, 64, (LayerSpec(), LayerSpec(window=40)),
    max_position_embeddings=256, dtype="bfloat16",
)  # fmt: skip
CONFIG = RunnerConfig(
    max_num_seqs=8,
    max_model_len=256,
    max_num_batched_tokens=64,
    num_blocks=30,
    block_size=16,
    async_scheduling=True,
    bucket_policy="refuse",
)
LADDER = Ladder(decode=(4, 8), mixed=(32, 64), finish=(8,))
STEPS, GREEDY_STEPS, AUDIT_EVERY = 500, 200, 25
KINDS = (
    {},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_p": 0.9, "min_tokens": 2},
    {"logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "bad_words_token_ids": [[7], [8, 9]]},
    {"logit_bias": {5: 2.0}, "allowed_token_ids": [5, 6, 7], "return_sampling_mask": True},
)


class Life:
    """A scheduler over a runner, one step in flight; which requests come and go is random."""

    def __init__(self, table=None):
        self.rng = np.random.default_rng(0)
        self.runner = DeviceRunner(MODEL, random_weights(MODEL), CONFIG, ladder=LADDER)
        if table is None:
            self.runner.warm_up()
        else:
            self.runner.table = table
        self.scheduler = Scheduler(CONFIG, len(self.runner.groups))
        self.in_flight: deque = deque()
        self.requests: list[Request] = []
        self.counts: Counter[str] = Counter()
        self.stems = [self.rng.integers(0, MODEL.vocab_size, 100).tolist() for _ in range(4)]

    def act(self, greedy: bool) -> None:
        if self.rng.random() < 0.4 and len(self.scheduler.waiting) < 8:
            prompt = [*self.stems[self.rng.integers(4)][: self.rng.integers(0, 100)], int(self.rng.integers(512))]
            params = SamplingParams(temperature=0.0, max_tokens=int(self.rng.integers(2, 40)), seed=7)
            if not greedy:
                kind = KINDS[self.rng.integers(len(KINDS))] if self.rng.random() < 0.5 else {}
                params = dataclasses.replace(params, temperature=float(self.rng.random() < 0.5), **kind)
            priority = int(self.rng.integers(-1, 2))
            self.requests.append(Request(f"r{len(self.requests)}", prompt, params, priority=priority))
            self.scheduler.add(self.requests[-1])
        if self.scheduler.running and self.rng.random() < 0.02:
            self.scheduler.abort(sorted(self.scheduler.running)[0])
            self.counts["aborted"] += 1

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        chunk = any(n > 1 for n in plan.num_scheduled_tokens.values())
        self.counts["mixed" if chunk else "decode"] += 1
        self.counts["preempted"] += len(plan.preempted_req_ids)
        self.counts["prefix hits"] += sum(r.num_computed_tokens > 0 for r in plan.scheduled_new_reqs)
        if self.runner.execute_model(plan) is None:
            self.in_flight.append((frame, self.runner.sample_tokens()))
        while self.in_flight and (len(self.in_flight) > 1 or not plan.total_num_scheduled_tokens):
            frame, output = self.in_flight.popleft()
            self.counts["finished"] += len(self.scheduler.update(frame, output.get_output()))

    def run(self) -> None:
        """STEPS steps, then to the last token; then nothing may be held."""
        compiled = 0
        for number in range(1, STEPS + 1):
            with CompileCounter() as counter:
                self.act(number < GREEDY_STEPS)
                self.step()
            compiled += counter.count
            if number % AUDIT_EVERY == 0:
                audit(self.runner.state, shared_blocks=True)
        with CompileCounter() as counter:
            while self.scheduler.has_work or self.in_flight:
                self.step()
        assert compiled + counter.count == 0, f"{compiled + counter.count} programs were compiled after warm-up"
        audit(self.runner.state, shared_blocks=True)
        self.scheduler.check_idle()
        assert len(self.runner.rows) == 0


def test_random_steps_compile_nothing_and_repeat_exactly():
    first = Life()
    first.run()
    assert all(first.counts[k] > 5 for k in ("mixed", "decode", "preempted", "prefix hits", "aborted", "finished"))
    for entry in first.runner.table.entries.values():
        assert entry.hits or entry.program.kind == "moves", f"{entry.program} never ran"
        if entry.program.kind in ("step", "begin"):
            held = mosaic_kernels(entry.compiled.as_text())
            assert held["rope_kv_write"] == MODEL.num_layers, (entry.program, held)

    again = Life(first.runner.table)
    again.run()
    assert again.counts == first.counts
    assert [r.output_token_ids for r in again.requests] == [r.output_token_ids for r in first.requests]
