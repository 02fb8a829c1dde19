"""Both runners in lockstep over random lives of sampled requests: the same tokens, reports and errors."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest

from jaxrunner import DeviceRunner, HostRunner, SamplingParams, StructuredOutputsParams
from jaxrunner.contract import GrammarOutput
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from tests.conftest import load_tiny
from tests.runner.conftest import table_of
from tests.runner.plans import CONFIG, LADDER
from tests.runner.test_custom import CUSTOM

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
    {"prompt_logprobs": 2, "prompt_logprob_token_ids": [7, 250], "temperature": 0.6},
    {"logprob_token_ids": [3, 9], "top_k": 4, "temperature": 1.0},
    {"structured_outputs": StructuredOutputsParams(regex="."), "temperature": 0.8},
    {"structured_outputs": StructuredOutputsParams(regex="."), "frequency_penalty": 0.4, "logprobs": 1},
)
CUSTOM_KINDS = (
    {"extra_args": {"counted": {"base": 30}}},
    {"extra_args": {"counted": {"base": 250}, "nudge": {"scale": -0.5}}, "temperature": 0.7},
    {"extra_args": {"picky": {"jump": 1}}, "temperature": 0.9, "top_k": 3},
    {"extra_args": {"picky": {"jump": 0}, "nudge": {"bias": [0.1, 0.0, -0.2]}}, "temperature": 0.9, "logprobs": 1},
)


class Lockstep:
    """One scheduler, whose plans go to both runners; depth: steps in flight."""

    def __init__(self, config, depth: int, num_blocks: int):
        changed = dataclasses.replace(config, check_invariants=False, async_scheduling=depth > 0)
        self.runners = []
        for runner_class in (DeviceRunner, HostRunner):
            self.runners.append(runner_class(*load_tiny("llama"), changed, ladder=LADDER, seed=5))
            self.runners[-1].table = table_of(runner_class, config)
        self.scheduler = Scheduler(dataclasses.replace(changed, num_blocks=num_blocks), 1, prefix_caching=True)
        self.depth, self.in_flight, self.num_preempted = depth, deque(), 0
        self.structured: set[str] = set()
        self.failed: set[str] = set()

    def add(self, req_id: str, prompt: list[int], params: SamplingParams, priority: int) -> None:
        if params.structured_outputs is not None:
            self.structured.add(req_id)
        request = Request(req_id, prompt, params, priority=priority)
        request.prompt_logprobs = [None] if params.scores_prompt else None
        self.scheduler.add(request)

    def masks(self, plan) -> GrammarOutput | None:
        """Those of the step's requests, of which each has some ids of its own."""
        named = sorted(self.structured & plan.num_scheduled_tokens.keys())
        masks = np.zeros((len(named), 8), np.int32)
        for row, req_id in enumerate(named):
            masks[row, int(req_id[1:]) % 8] = 0x0F0F0F0F
        return GrammarOutput(named, masks) if named else None

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        self.num_preempted += len(plan.preempted_req_ids)
        answers = [runner.execute_model(plan) for runner in self.runners]
        assert (answers[0] is None) == (answers[1] is None)
        if answers[0] is None:
            masks = self.masks(plan)
            self.in_flight.append((frame, [runner.sample_tokens(masks) for runner in self.runners]))
        while self.in_flight and (len(self.in_flight) > self.depth or not plan.total_num_scheduled_tokens):
            frame, outputs = self.in_flight.popleft()
            device, host = (o.get_output() if self.depth else o for o in outputs)
            compare(device, host, self.failed)
            self.scheduler.update(frame, device)
            for req_id in device.sampling_errors.keys() - self.failed:
                self.scheduler.abort(req_id)
            self.failed |= device.sampling_errors.keys()
            for runner in self.runners:
                runner.audit(shared_blocks=True)


def compare(device, host, failed: set[str]) -> None:
    """Outputs name their requests in an order of their own. failed: requests that an earlier output has ended; a step
    that was launched before anybody knew runs the last token of a prompt here, and its first ones again there."""
    assert sorted(device.req_ids) == sorted(host.req_ids)
    errors = ({r: e for r, e in out.sampling_errors.items() if r not in failed} for out in (device, host))
    assert next(errors) == next(errors)
    assert (device.logprobs is None) == (host.logprobs is None)
    for req_id, i in device.req_id_to_index.items():
        j = host.req_id_to_index[req_id]
        assert device.sampled_token_ids[i] == host.sampled_token_ids[j], req_id
        if device.logprobs is not None:
            np.testing.assert_array_equal(device.logprobs.logprob_token_ids[i], host.logprobs.logprob_token_ids[j])
            np.testing.assert_allclose(device.logprobs.logprobs[i], host.logprobs.logprobs[j], atol=1e-5)
            assert device.logprobs.sampled_token_ranks[i] == host.logprobs.sampled_token_ranks[j]
        if device.sampling_masks is not None:
            masks = device.sampling_masks.of_request(i), host.sampling_masks.of_request(j)
            np.testing.assert_array_equal(*masks)

    assert device.prompt_logprobs_dict.keys() == host.prompt_logprobs_dict.keys()
    for req_id, lists in device.prompt_logprobs_dict.items():
        np.testing.assert_array_equal(lists.logprob_token_ids, host.prompt_logprobs_dict[req_id].logprob_token_ids)
        np.testing.assert_allclose(lists.logprobs, host.prompt_logprobs_dict[req_id].logprobs, atol=1e-5)
        listed = (d.prompt_token_id_logprobs_dict[req_id] for d in (device, host))
        np.testing.assert_allclose(*listed, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "kinds", "depth", "seed"),
    [
        (CONFIG, KINDS, 0, 0),
        (CONFIG, KINDS, 1, 2),
        (CONFIG, KINDS, 1, 3),
        (CUSTOM, (*CUSTOM_KINDS, *KINDS[:6]), 0, 1),
        (CUSTOM, (*CUSTOM_KINDS, *KINDS[:6]), 1, 4),
    ],
    ids=["plain", "plain-async", "plain-async-again", "custom", "custom-async"],
)
def test_random_lives_of_sampled_requests(config, kinds, depth, seed):
    rng = np.random.default_rng(seed)
    both = Lockstep(config, depth, num_blocks=8)
    stems = [rng.integers(2, 250, 30).tolist() for _ in range(2)]
    names = []
    for number in range(30):
        kind = {"seed": number, "temperature": 0.0, **kinds[rng.integers(len(kinds))]}
        params = SamplingParams(max_tokens=int(rng.integers(3, 12)), **kind)
        prompt = stems[rng.integers(2)][: rng.integers(1, 31)]
        names.append(f"r{number}")
        both.add(names[-1], prompt, params, int(rng.integers(-1, 2)))
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
