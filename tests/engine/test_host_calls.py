"""A steady decode step runs the same number of Python calls for 8 requests and for 64: none of them is per request."""

from __future__ import annotations

from benchmarks.host_step import StubEngine, count_calls, steady
from jaxrunner import StepTimer

MOST_CALLS_OF_A_TIMER = 30


def calls_of(num_requests: int, *, timed: bool = False) -> float:
    engine = StubEngine(num_requests)
    steady(engine)
    if not timed:
        return count_calls(engine)
    with StepTimer(engine.runner):
        return count_calls(engine)


def test_python_calls_do_not_grow_with_the_number_of_requests():
    few, many = calls_of(8), calls_of(64)
    print(f"\n{few} Python calls a step")
    assert few == many


def test_a_timer_costs_few_calls_a_step_and_none_of_them_is_per_request():
    off, few, many = calls_of(8), calls_of(8, timed=True), calls_of(64, timed=True)
    print(f"\n{few - off} Python calls of a timer a step")
    assert few == many
    assert 0 < few - off <= MOST_CALLS_OF_A_TIMER


def test_a_closed_timer_costs_nothing():
    engine = StubEngine(8)
    StepTimer(engine.runner).close()
    steady(engine)
    assert count_calls(engine) == calls_of(8)
