"""Random lives through the real scheduler and both runners: every request gets the tokens it gets alone in NumPy."""

from __future__ import annotations

import dataclasses
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrunner import DeviceRunner, HostRunner
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.runner_state import host_view
from tests.conftest import GOLDEN, load_tiny
from tests.oracle.continuation import continuation
from tests.runner.plans import CONFIG, LADDER

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 24, 31)
MOST_TOKENS = 12

LENGTH, TOKENS, NAME = st.sampled_from(LENGTHS), st.integers(1, MOST_TOKENS), st.integers(0, 30)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), LENGTH, TOKENS, st.integers(-1, 1)),
        st.tuples(st.just("abort"), NAME),
        st.tuples(st.just("resubmit"), NAME, st.integers(0, 2), LENGTH),
        st.tuples(st.just("replace"), NAME, st.integers(0, 2), LENGTH),
        st.tuples(st.just("steps"), st.integers(1, 6)),
    ),
    min_size=4,
    max_size=24,
)


@pytest.fixture(scope="module")
def families():
    """Three token sequences: the longest golden prompt, the middle one, and one that shares its first block."""
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    long, middle = (data[f"input_ids_{i}"].reshape(-1).tolist() for i in (2, 1))
    return long, middle + long[:20], middle[:10] + long[20:50]


@pytest.fixture(scope="module", params=[DeviceRunner, HostRunner])
def warm_runner(request):
    """(class, table) of a runner. What greedy requests need; the decodes of other tiers begin in another program."""
    table = request.getfixturevalue("host_table" if request.param is HostRunner else "shared_table")
    greedy = (p for p in table.programs.all() if p.tier == "greedy" and p.kind != "moves")
    table.warm_up(p for p in greedy if not (p.kind == "begin" and p.bucket.kind == "decode"))
    return request.param, table


class Engine:
    """A scheduler over a runner; depth: results in flight before the oldest is taken. num_blocks and budget are the
    scheduler's, at most what the runner was compiled for.
    """

    def __init__(self, warm_runner, depth: int, num_blocks: int, budget: int, prefix_caching: bool):
        model, weights = load_tiny("llama")
        config = dataclasses.replace(CONFIG, check_invariants=False, async_scheduling=depth > 0)
        runner_class, table = warm_runner
        self.runner = runner_class(model, weights, config, ladder=LADDER)
        self.runner.table = table
        smaller = dataclasses.replace(config, num_blocks=num_blocks, max_num_batched_tokens=budget)
        self.scheduler = Scheduler(smaller, 1, prefix_caching=prefix_caching)
        self.depth = depth
        self.in_flight: deque = deque()
        self.num_preempted = 0

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        self.num_preempted += len(plan.preempted_req_ids)
        if self.runner.execute_model(plan) is None:
            self.in_flight.append((frame, self.runner.sample_tokens()))
        while self.in_flight and (len(self.in_flight) > self.depth or not plan.total_num_scheduled_tokens):
            frame, output = self.in_flight.popleft()
            self.scheduler.update(frame, output.get_output() if self.depth else output)

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work and not self.in_flight:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def request_of(name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens), priority=priority)


def live(engine: Engine, families, actions) -> dict[str, Request]:
    """Do the actions; the requests that were not aborted, by name."""
    alive: dict[str, Request] = {}
    count = 0
    for action, *arguments in actions:
        names = sorted(alive)
        if action == "add":
            family, length, max_tokens, priority = arguments
            name, count = f"r{count}", count + 1
            alive[name] = request_of(name, families[family][:length], max_tokens, priority)
            engine.scheduler.add(alive[name])
        elif action == "steps":
            for _ in range(arguments[0]):
                engine.step()
        elif names:
            name = names[arguments[0] % len(names)]
            if action == "abort":
                engine.scheduler.abort(name)
                del alive[name]
                continue
            request = request_of(name, families[arguments[1]][: arguments[2]], 6)
            if action == "resubmit":
                engine.scheduler.abort(name)
                engine.scheduler.add(request)
            else:
                engine.scheduler.replace(request)
            alive[name] = request
    return alive


def check(engine: Engine, alive: dict[str, Request]) -> None:
    """Tokens, then what is left behind: no row, no block, a state that passes its audit."""
    for request in alive.values():
        expected = continuation(tuple(request.prompt_token_ids), MOST_TOKENS)[: request.params.max_tokens]
        assert len(request.output_token_ids) == request.params.max_tokens, request.request_id
        assert request.output_token_ids[: len(expected)] == expected, request.request_id
    engine.scheduler.check_idle()
    assert len(engine.runner.rows) == 0
    if isinstance(engine.runner, DeviceRunner):
        total_len = host_view(engine.runner.state.requests.total_len)
        assert not total_len.any(), "a row of a request that is gone is not empty"
    engine.runner.audit(shared_blocks=engine.scheduler.prefix_caching)


def test_the_numpy_continuation_is_the_golden_one():
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    for i in range(3):
        tokens = continuation(tuple(data[f"input_ids_{i}"].reshape(-1).tolist()), MOST_TOKENS)
        assert tokens == data[f"greedy_{i}"][: len(tokens)].tolist()
        assert len(tokens) >= 6


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=ACTIONS,
    depth=st.integers(0, 1),
    num_blocks=st.sampled_from([8, 12, 40]),
    budget=st.sampled_from([4, 9, 32]),
    prefix_caching=st.booleans(),
)
def test_random_lives(warm_runner, families, actions, depth, num_blocks, budget, prefix_caching):
    engine = Engine(warm_runner, depth, num_blocks, budget, prefix_caching)
    with CompileCounter() as counter:
        alive = live(engine, families, actions)
        engine.run()
    assert counter.count == 0, f"{counter.count} programs were compiled after warm-up"
    check(engine, alive)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_small_pool_preempts_and_nothing_is_lost(warm_runner, families, depth):
    """What the random lives must meet: preemption and resumption, under prefix sharing."""
    engine = Engine(warm_runner, depth, 8, 32, True)
    actions = [("add", i % 3, 17, MOST_TOKENS, 0) for i in range(6)] + [("steps", 3), ("add", 0, 24, 9, -1)]
    alive = live(engine, families, actions)
    engine.runner.audit(shared_blocks=True)
    engine.run()
    assert engine.num_preempted
    check(engine, alive)
