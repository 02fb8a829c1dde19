"""Host arrays that were handed over may be overwritten at once: no step, earlier or running, sees it (K084, K121)."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import jaxrunner
from jaxrunner import SamplingParams
from jaxrunner.compile.buckets import Bucket
from jaxrunner.state.admission import AdmitEntry, admit_layout, pack_admit
from jaxrunner.state.runner_state import host_view
from tests.stages import harness

BUCKET = Bucket("mixed", 64, 8, 64, "random")


def new_state():
    model, _ = harness.tiny("llama")
    return jaxrunner.init_state(model, max_requests=8, max_model_len=256, num_blocks=140)


def prompts():
    return [np.random.default_rng(i).integers(0, 256, 100).astype(np.int32) for i in range(8)]


def same(a, b):
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_k121_prompts_may_be_overwritten_after_admission():
    """Large enough that JAX aliases instead of copying."""
    params = [SamplingParams(temperature=0.5, seed=i) for i in range(8)]
    expected, _ = jaxrunner.admit(new_state(), prompts(), params)
    mine = prompts()
    state, _ = jaxrunner.admit(new_state(), mine, params)
    for prompt in mine:
        prompt[...] = -1
    assert same(state, expected)


def test_k084_inputs_may_be_overwritten_while_the_step_runs():
    model, weights = harness.tiny("llama")
    state, rows = jaxrunner.admit(new_state(), prompts(), SamplingParams(temperature=0.7, seed=3))
    inputs = jaxrunner.plan(state, dict.fromkeys(rows, 8))
    expected = harness.run(model, weights, state, inputs, BUCKET)
    for _ in range(5):
        arrays = {name: value.copy() for name, value in vars(inputs).items() if isinstance(value, np.ndarray)}
        mine = dataclasses.replace(inputs, **arrays)
        outcome = harness.run(model, weights, state, mine, BUCKET)
        assert len(arrays) >= 4
        for array in arrays.values():
            array[...] = 1
        assert same(outcome, expected)


def test_uploads_are_fresh_and_cannot_be_written():
    """The vector that a running step may still read is nobody's scratch space."""
    state, rows = jaxrunner.admit(new_state(), prompts())
    inputs = jaxrunner.plan(state, dict.fromkeys(rows, 8))
    layout = admit_layout(128, 8)
    tokens = np.arange(128, dtype=np.int32)
    for pack in (lambda: inputs.pack(BUCKET), lambda: pack_admit(layout, [AdmitEntry(1, tokens=tokens)])):
        first, second = pack(), pack()
        assert not np.shares_memory(first, second)
        with pytest.raises(ValueError, match="read-only"):
            first[:] = 0
    assert not np.shares_memory(first, tokens)


def test_a_host_view_is_a_copy():
    state, _ = jaxrunner.admit(new_state(), prompts())
    before = np.array(state.requests.token_ids)
    host_view(state.requests.token_ids)[...] = -1
    np.testing.assert_array_equal(state.requests.token_ids, before)
