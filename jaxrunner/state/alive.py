"""The check behind `DonatedStateError`: a state whose arrays were given away cannot be used again."""

from __future__ import annotations

import jax

from jaxrunner.errors import DonatedStateError


def check_alive(state) -> None:
    """Raises DonatedStateError, naming the first dead leaf, if a call has consumed `state`. Tracers pass."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
            raise DonatedStateError(_message(jax.tree_util.keystr(path)))


def _message(leaf: str) -> str:
    return f"""state{leaf} was donated: a call that consumed this state has reused its memory.

Wrong: the old name is used after a donating call took it
    run = jax.jit(jaxrunner.step, static_argnames=("model", "bucket"), donate_argnames="state")
    new_state, out = run(model, weights, state, inputs, bucket=bucket)
    jaxrunner.plan(state, ...)                  # state is gone

Right: rebind the name, or go on from the new state
    state, out = run(model, weights, state, inputs, bucket=bucket)
    jaxrunner.plan(state, ...)

To keep the old state as well, call without donating, which copies what changes:
    new_state, out = jaxrunner.step(model, weights, state, inputs, bucket=bucket)
A `DeviceRunner` donates its state at every step; read `runner.state` again after the call."""
