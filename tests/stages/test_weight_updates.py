"""New weights between steps: the next step uses them, and nothing is compiled."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import jaxrunner
from jaxrunner import DeviceRunner, init_state
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.errors import BucketMissError
from jaxrunner.models.weights import random_weights
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER, new, plan, run
from tests.stages import harness

PROMPT = list(range(30, 43))


@pytest.fixture(scope="module")
def make_runner():
    """Runners over the executables of one."""
    tables: list = []

    def make(weights):
        runner = DeviceRunner(load_tiny("llama")[0], weights, CONFIG, ladder=LADDER)
        tables.append(runner.table)
        runner.table = tables[0]
        return runner

    return make


def test_in_a_users_jit():
    model, weights = harness.tiny("llama")
    bucket = harness.Bucket("mixed", 16, 3, 16)
    state = init_state(model, max_requests=3, max_model_len=32, num_blocks=12)
    state, (row,) = jaxrunner.admit(state, [PROMPT])
    packed = jaxrunner.plan(state, {row: len(PROMPT)}).pack(bucket)
    others = [random_weights(model, seed) for seed in range(3)]
    harness.run(model, weights, state, packed, bucket)
    with CompileCounter() as counter:
        hidden = [np.asarray(harness.run(model, w, state, packed, bucket)[1].hidden) for w in (weights, *others)]
        again = np.asarray(harness.run(model, weights, state, packed, bucket)[1].hidden)
    assert counter.count == 0
    assert all((a != b).any() for a, b in itertools.pairwise(hidden))
    np.testing.assert_array_equal(hidden[0], again)


def test_in_a_runner(make_runner):
    """`runner.weights` may be set between steps; the tokens are those of a runner that began with these weights."""
    model, weights = load_tiny("llama")
    other = random_weights(model, 7)

    def tokens(runner, req_id, steps=6):
        ids = run(runner, plan({req_id: len(PROMPT)}, [new(req_id, PROMPT, [1, 2, 3])]))[req_id]
        for _ in range(steps):
            ids += run(runner, plan({req_id: 1}))[req_id]
        runner.execute_model(plan({}, finished_req_ids={req_id}))
        return ids

    runner = make_runner(weights)
    first = tokens(runner, "a")
    with CompileCounter() as counter:
        runner.weights = other
        second = tokens(runner, "b")
        runner.weights = weights
        third = tokens(runner, "c")
    assert counter.count == 0
    assert first == third != second
    assert tokens(make_runner(other), "d") == second


def test_weights_of_another_kind_are_refused_by_name(make_runner):
    runner = make_runner(load_tiny("llama")[1])
    run(runner, plan({"a": len(PROMPT)}, [new("a", PROMPT, [1, 2, 3])]))
    runner.weights = jax.tree.map(lambda w: w.astype(jax.numpy.bfloat16), runner.weights)
    with pytest.raises(BucketMissError, match=r"(?s)bfloat16.*weights are replaced with arrays of the same kind"):
        run(runner, plan({"a": 1}))
