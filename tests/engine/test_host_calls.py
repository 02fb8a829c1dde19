"""A steady decode step runs the same number of Python calls for 8 requests and for 64: none of them is per request."""

from __future__ import annotations

import pytest

from benchmarks.host_step import RUNNERS, StubEngine, count_calls, steady
from jaxrunner import StepTimer

MOST_CALLS_OF_A_TIMER = 30
every_runner = pytest.mark.parametrize("runner", RUNNERS)


def calls_of(num_requests: int, runner: str, *, timed: bool = False) -> float:
    engine = StubEngine(num_requests, RUNNERS[runner])
    steady(engine)
    if not timed:
        return count_calls(engine)
    with StepTimer(engine.runner):
        return count_calls(engine)


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
    assert count_calls(engine) == calls_of(8, runner)
