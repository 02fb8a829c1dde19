"""A steady decode step runs the same number of Python calls for 8 requests and for 64: none of them is per request."""

from __future__ import annotations

import pytest

from benchmarks.host_step import RUNNERS, StubEngine, count_calls, steady


def calls_of(num_requests: int, runner: str) -> float:
    engine = StubEngine(num_requests, RUNNERS[runner])
    steady(engine)
    return count_calls(engine)


@pytest.mark.parametrize("runner", RUNNERS)
def test_python_calls_do_not_grow_with_the_number_of_requests(runner):
    few, many = calls_of(8, runner), calls_of(64, runner)
    print(f"\n{few} Python calls a step")
    assert few == many
