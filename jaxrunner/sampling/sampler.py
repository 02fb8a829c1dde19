"""One token per row of logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.compile.buckets import Tier
from jaxrunner.sampling.random import gumbel, row_keys
from jaxrunner.state.sampling import SamplingState

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would overflow (vLLM's `_SAMPLING_EPS`)."""


def sample_tokens(
    logits: Float32[Array, "B V"], params: SamplingState, position: Int32[Array, "B"], *, tier: Tier
) -> Int32[Array, "B"]:
    """Sampled ids, i32[B], always inside the vocabulary.

    params: the rows' parameters in batch order. position: index the new token will have in its request.
    tier "greedy": exact argmax, the lowest id on a tie. tier "random": rows with a temperature take the argmax of
    logits / temperature + Gumbel noise, which draws from the softmax; greedy rows as before.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if tier == "greedy":
        return greedy
    temperature = params.temperature
    is_greedy = temperature < GREEDY_BELOW
    # Subtracting the maximum first keeps a small temperature from overflowing to infinity.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(is_greedy, 1.0, temperature)[:, None]
    noise = gumbel(row_keys(params.seed, position), logits.shape[-1])
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(is_greedy, greedy, drawn)
