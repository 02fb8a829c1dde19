"""Donation: a fresh state can be given away whole, and using it afterwards says what to write instead."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

import jaxrunner
from jaxrunner.compile.buckets import Bucket
from jaxrunner.errors import DonatedStateError
from jaxrunner.state.runner_state import host_view
from tests.stages import harness

BUCKET = Bucket("mixed", 16, 3, 16)


def new_state():
    model, _ = harness.tiny("llama")
    return jaxrunner.init_state(model, max_requests=3, max_model_len=32, num_blocks=12, num_draft_tokens=0)


@functools.cache
def donating_step():
    model, _ = harness.tiny("llama")
    return jax.jit(functools.partial(jaxrunner.step, model, bucket=BUCKET), donate_argnames="state")


def consumed_state():
    """(a state that a donating step took, the new one, the row in it)."""
    _, weights = harness.tiny("llama")
    state, (row,) = jaxrunner.admit(new_state(), [[1, 2, 3]])
    packed = jaxrunner.plan(state, {row: 3}).pack(BUCKET)
    after, _ = donating_step()(weights, state=state, inputs=packed)
    return state, after, row


def pointers(tree):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if leaf.size]


def test_k122_no_two_leaves_share_a_buffer():
    """Neither within a new state, with drafts and groups, nor after admission, nor with the weights."""
    model, weights = harness.tiny("qwen2", (None, 8, 8))
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=32, num_blocks=12, num_draft_tokens=4)
    assert len(set(pointers((state, weights)))) == len(pointers((state, weights)))
    state, _ = jaxrunner.admit(state, [[1, 2], [3]])
    assert len(set(pointers((state, weights)))) == len(pointers((state, weights)))


def test_a_whole_new_state_can_be_donated():
    """Every leaf is taken and reused, without JAX's warning about buffers it could not use."""
    state = jaxrunner.init_state(
        harness.tiny("llama")[0], max_requests=3, max_model_len=32, num_blocks=12, num_draft_tokens=2
    )
    before = pointers(state)
    after = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert sorted(pointers(after)) == sorted(before)


def test_a_step_takes_the_whole_state():
    state, after, _ = consumed_state()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    jaxrunner.audit(after)


def test_looking_at_a_state_does_not_stop_its_donation():
    """A live NumPy view of a leaf would; `host_view` copies."""
    state = new_state()
    views = [host_view(leaf) for leaf in jax.tree.leaves(state)]
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert all(not view.any() for view in views)


CALLS = {
    "step": lambda state, row: jaxrunner.step(*harness.tiny("llama"), state, None, bucket=BUCKET),
    "plan": lambda state, row: jaxrunner.plan(state, {row: 1}),
    "admit": lambda state, row: jaxrunner.admit(state, [[1]]),
    "reserve": lambda state, row: jaxrunner.reserve(state, [row], 4),
    "release": lambda state, row: jaxrunner.release(state, [row]),
    "audit": lambda state, row: jaxrunner.audit(state),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_consumed_state_is_refused_with_the_way_out(name):
    state, after, row = consumed_state()
    with pytest.raises(DonatedStateError) as caught:
        CALLS[name](state, row)
    message = str(caught.value)
    assert message.startswith("state.requests.token_ids was donated")
    wrong, right = message.index("Wrong:"), message.index("Right:")
    assert wrong < right
    assert "new_state, out = run(" in message[wrong:right]
    assert re.search(r"^ *state, out = run\(", message[right:], re.MULTILINE)
    if name != "step":
        CALLS[name](after, row)


def test_a_state_that_was_not_donated_can_be_used_again():
    """Without donation a step is a function of values: the same state gives the same step."""
    model, weights = harness.tiny("llama")
    state, (row,) = jaxrunner.admit(new_state(), [[1, 2, 3]])
    inputs = jaxrunner.plan(state, {row: 3})
    outcomes = [harness.run(model, weights, state, inputs, BUCKET) for _ in range(2)]
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), *outcomes)
    assert all(jax.tree.leaves(same))
    jaxrunner.audit(state)
