"""Drives the scheduler against the oracle runner, with results that may be some steps late."""

from __future__ import annotations

from collections import deque

from jaxrunner import SamplingParams
from jaxrunner.contract import ModelRunnerOutput
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.runner.config import RunnerConfig
from tests.oracle.runner import OracleRunner


class Engine:
    """depth: results in flight before the oldest is taken (0 is synchronous)."""

    def __init__(self, *, depth=0, max_num_seqs=3, max_model_len=64, budget=16, num_blocks=30, block_size=4, **options):
        config = RunnerConfig(max_num_seqs, max_model_len, budget, num_blocks, block_size)
        self.scheduler = Scheduler(config, 1, **options)
        self.runner = OracleRunner(max_num_seqs, num_blocks, block_size, budget)
        self.depth = depth
        self.in_flight: deque = deque()
        self.ended: list[Request] = []
        self.plans: list = []

    def add(self, req_id: str, prompt: list[int], max_tokens: int | None = 4, **fields) -> Request:
        stop = tuple(fields.pop("stop_token_ids", ()))
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop_token_ids=stop)
        request = Request(req_id, prompt, params, **fields)
        self.scheduler.add(request)
        return request

    def step(self):
        plan, frame = self.scheduler.schedule()
        self.plans.append(plan)
        if plan.total_num_scheduled_tokens or plan.finished_req_ids or plan.preempted_req_ids:
            result = self.runner.step(plan)
            index = {req_id: i for i, req_id in enumerate(result.req_ids)}
            self.in_flight.append((frame, ModelRunnerOutput(result.req_ids, index, result.sampled_token_ids)))
        while self.in_flight and (len(self.in_flight) > self.depth or not plan.total_num_scheduled_tokens):
            self.ended += self.scheduler.update(*self.in_flight.popleft())
        return plan

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.in_flight:
                self.scheduler.check_idle()
                assert not self.runner.requests
                return
            self.step()
        raise AssertionError("the engine does not come to an end")
