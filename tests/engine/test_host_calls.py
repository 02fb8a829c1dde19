"""A steady decode step runs the same number of Python calls for 8 requests and for 64: none of them is per request."""

from __future__ import annotations

import pytest

from benchmarks.host_step import RUNNERS, StubEngine, count_calls, steady
from jaxrunner import StepTimer

MOST_CALLS_OF_A_TIMER = 30
MOST_CALLS_OF_BLOCKS = 30
MOST_CALLS = {"device": 52, "host": 120}
"""Of a runner, for a steady decode. Raise one only for something that is worth its microseconds in every step."""
every_runner = pytest.mark.parametrize("runner", RUNNERS)


def calls_of(num_requests: int, runner: str, *, timed: bool = False) -> float:
    engine = StubEngine(num_requests, RUNNERS[runner])
    steady(engine)
    if not timed:
        return count_calls(engine.step)
    with StepTimer(engine.runner):
        return count_calls(engine.step)


@every_runner
def test_python_calls_do_not_grow_with_the_number_of_requests(runner):
    few, many = calls_of(8, runner), calls_of(64, runner)
    print(f"\n{few} Python calls a step")
    assert few == many


@every_runner
def test_a_timer_costs_few_calls_a_step_and_none_of_them_is_per_request(runner):
    off, few, many = calls_of(8, runner), calls_of(8, runner, timed=True), calls_of(64, runner, timed=True)
    print(f"\n{few - off} Python calls of a timer a step")
    assert few == many
    assert 0 < few - off <= MOST_CALLS_OF_A_TIMER


@every_runner
def test_a_closed_timer_costs_nothing(runner):
    engine = StubEngine(8, RUNNERS[runner])
    StepTimer(engine.runner).close()
    steady(engine)
    assert count_calls(engine.step) == calls_of(8, runner)


def calls_of_a_runner(num_requests: int, runner: str, *, blocks_join: bool) -> float:
    """Of one step of the runner alone. blocks_join: every request enters a new block with it."""
    engine = StubEngine(num_requests, RUNNERS[runner])
    steady(engine)
    while engine.scheduler.columns.computed[0] % 16 != (0 if blocks_join else 3):
        engine.step()
    plan, _ = engine.scheduler.schedule()
    joining, _ = plan.scheduled_cached_reqs.with_new_blocks()
    assert len(joining) == (num_requests if blocks_join else 0)
    return count_calls(lambda: (engine.runner.execute_model(plan), engine.runner.sample_tokens()), steps=1)


@every_runner
def test_a_step_in_which_blocks_join_runs_no_python_per_request(runner):
    steady_calls = calls_of_a_runner(64, runner, blocks_join=False)
    few, many = (calls_of_a_runner(n, runner, blocks_join=True) for n in (8, 64))
    print(f"\n{steady_calls} Python calls of a runner a step, {many} if blocks join")
    assert few == many
    assert steady_calls <= MOST_CALLS[runner]
    assert many - steady_calls <= MOST_CALLS_OF_BLOCKS
