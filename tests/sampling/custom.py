"""Logits processors and samplers of a user, for tests."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrunner import LogitsProcessor, RequestArray, Sampler
from jaxrunner.sampling.random import gumbel


def _counted(logits, context):
    calls = context.arrays["calls"]
    ids = (context.arrays["base"] + calls) % logits.shape[1]
    return logits.at[jnp.arange(len(ids)), ids].add(1e6), {"calls": calls + 1}


counted = LogitsProcessor(
    _counted,
    name="counted",
    arrays=(RequestArray("base", dtype="int32", default=None), RequestArray("calls", dtype="int32", updated=True)),
)
"""The tokens of a request with base b are b, b + 1, b + 2, ..., by a count that only its own array knows."""


def _nudge(logits, context):
    return logits + context.arrays["scale"][:, None] * context.arrays["bias"].sum(axis=1)[:, None] * jnp.arange(
        logits.shape[1], dtype=jnp.float32
    )


nudge = LogitsProcessor(
    _nudge, name="nudge", arrays=(RequestArray("scale", default=0.25), RequestArray("bias", (3,), default=0.5))
)


def _picky(scores, context, keys):
    """The built-in draw, then a jump by as much as the request asks, which may lead anywhere; counts its jumps."""
    drawn = jnp.argmax(scores + gumbel(keys, scores.shape[1]), axis=-1).astype(jnp.int32)
    return drawn + context.arrays["jump"], {"sum": context.arrays["sum"] + context.arrays["jump"]}


picky = Sampler(
    _picky,
    name="picky",
    arrays=(RequestArray("jump", dtype="int32"), RequestArray("sum", dtype="int32", updated=True)),
)
