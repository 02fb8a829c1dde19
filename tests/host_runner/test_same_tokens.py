"""Both runners in lockstep over random lives of sampled requests: the same tokens, reports and errors."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest

from jaxrunner import DeviceRunner, SamplingParams
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from tests.conftest import load_tiny
from tests.host_runner.plans import host_runner
from tests.runner.plans import CONFIG, LADDER

KINDS = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "seed": None},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "logprobs": 2, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "logit_bias": {9: 3.0}},
    {"min_tokens": 3, "stop_token_ids": (11, 12), "presence_penalty": 1.0},
    {"allowed_token_ids": [3, 4, 5, 6], "bad_words_token_ids": [[4, 5], [6]], "return_sampling_mask": True},
    {"replay_token_ids": [1, 2, 3], "logprobs": 0},
)


class Lockstep:
    """One scheduler, whose plans go to both runners; depth: steps in flight."""

    def __init__(self, table, host_table, depth: int, num_blocks: int):
        config = dataclasses.replace(CONFIG, check_invariants=False, async_scheduling=depth > 0)
        device = DeviceRunner(*load_tiny("llama"), config, ladder=LADDER, seed=5)
        device.table = table
        host = host_runner(load_tiny("llama"), host_table, check_invariants=False, async_scheduling=depth > 0)
        host._seed = 5
        self.runners = device, host
        self.scheduler = Scheduler(dataclasses.replace(config, num_blocks=num_blocks), 1)
        self.depth, self.in_flight, self.num_preempted = depth, deque(), 0

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        self.num_preempted += len(plan.preempted_req_ids)
        answers = [runner.execute_model(plan) for runner in self.runners]
        assert (answers[0] is None) == (answers[1] is None)
        if answers[0] is None:
            self.in_flight.append((frame, [runner.sample_tokens() for runner in self.runners]))
        while self.in_flight and (len(self.in_flight) > self.depth or not plan.total_num_scheduled_tokens):
            frame, outputs = self.in_flight.popleft()
            device, host = (o.get_output() if self.depth else o for o in outputs)
            compare(device, host)
            self.scheduler.update(frame, device)
            for runner in self.runners:
                runner.audit(shared_blocks=True)


def compare(device, host) -> None:
    """Outputs name their requests in an order of their own."""
    assert sorted(device.req_ids) == sorted(host.req_ids)
    assert device.sampling_errors == host.sampling_errors
    assert (device.logprobs is None) == (host.logprobs is None)
    for req_id, i in device.req_id_to_index.items():
        j = host.req_id_to_index[req_id]
        assert device.sampled_token_ids[i] == host.sampled_token_ids[j], req_id
        if device.logprobs is not None:
            np.testing.assert_array_equal(device.logprobs.logprob_token_ids[i], host.logprobs.logprob_token_ids[j])
            np.testing.assert_allclose(device.logprobs.logprobs[i], host.logprobs.logprobs[j], atol=1e-5)
        if device.sampling_masks is not None:
            masks = device.sampling_masks.of_request(i), host.sampling_masks.of_request(j)
            np.testing.assert_array_equal(*masks)


@pytest.mark.parametrize(("depth", "seed"), [(0, 0), (0, 1), (1, 2), (1, 3)])
def test_random_lives_of_sampled_requests(shared_table, host_table, depth, seed):
    rng = np.random.default_rng(seed)
    both = Lockstep(shared_table, host_table, depth, num_blocks=8)
    stems = [rng.integers(2, 250, 30).tolist() for _ in range(2)]
    names = []
    for number in range(24):
        kind = {"seed": number, "temperature": 0.0, **KINDS[rng.integers(len(KINDS))]}
        params = SamplingParams(max_tokens=int(rng.integers(3, 12)), **kind)
        prompt = stems[rng.integers(2)][: rng.integers(1, 31)]
        names.append(f"r{number}")
        both.scheduler.add(Request(names[-1], prompt, params, priority=int(rng.integers(-1, 2))))
        for _ in range(rng.integers(0, 4)):
            both.step()
        if rng.random() < 0.15:
            both.scheduler.abort(names[rng.integers(len(names))])
    for _ in range(500):
        if not both.scheduler.has_work and not both.in_flight:
            break
        both.step()
    assert not both.scheduler.has_work
    assert not any(len(runner.rows) for runner in both.runners)
    assert both.num_preempted
