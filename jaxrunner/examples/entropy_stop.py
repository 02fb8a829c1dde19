"""Stop when the model no longer knows: a request ends once the running mean of its entropy is above a threshold.

The mean belongs to the request: it is an array that the processor updates itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrunner.sampling.custom import LogitsProcessor, SamplingContext
from jaxrunner.state.request_arrays import RequestArray


def entropy(logits: jax.Array) -> jax.Array:
    """f32[B], nats of softmax(logits) f32[B, V]. Ids at -inf count as nothing, in the gradient too."""
    logprobs = jax.nn.log_softmax(logits)
    is_possible = logits != -jnp.inf
    return -jnp.sum(jnp.where(is_possible, jnp.exp(logprobs) * jnp.where(is_possible, logprobs, 0), 0), axis=-1)


def _entropy_stop(logits: jax.Array, context: SamplingContext) -> tuple[jax.Array, dict[str, jax.Array]]:
    arrays, count = context.arrays, context.position - context.prompt_len + 1
    weight = 1 / jnp.minimum(count, arrays["window"]).astype(jnp.float32)
    mean = arrays["mean"] + (entropy(logits) - arrays["mean"]) * weight
    ends = (count >= arrays["window"]) & (mean > arrays["threshold"])
    is_stop = jnp.arange(logits.shape[1]) == arrays["stop_id"][:, None]
    return jnp.where(ends[:, None] & ~is_stop, -jnp.inf, logits), {"mean": mean}


entropy_stop = LogitsProcessor(
    _entropy_stop,
    name="entropy_stop",
    arrays=(
        RequestArray("stop_id", dtype="int32", default=None),
        RequestArray("threshold", default=4.0),
        RequestArray("window", dtype="int32", default=8),
        RequestArray("mean", updated=True),
    ),
)
"""For requests with `extra_args={"entropy_stop": {"stop_id": eos}}`. threshold: nats. window: tokens of output over
which the mean runs; it is plain until there are so many, and exponential afterwards. Nothing is forced before."""
