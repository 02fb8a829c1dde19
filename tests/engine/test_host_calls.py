"""A steady decode step runs the same number of Python calls for 8 requests and for 64: none of them is per request."""

from __future__ import annotations

from benchmarks.host_step import StubEngine, count_calls, steady


def calls_of(num_requests: int) -> float:
    engine = StubEngine(num_requests)
    steady(engine)
    return count_calls(engine)


def test_python_calls_do_not_grow_with_the_number_of_requests():
    few, many = calls_of(8), calls_of(64)
    print(f"\n{few} Python calls a step")
    assert few == many
