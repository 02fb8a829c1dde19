"""Mirostat: a sampler that holds the surprise of a text at a target, by feedback for each request.

Ids with more surprise than a bound are dropped; after each draw the bound moves against the error.
Source: Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity", in the form
without an estimate of Zipf's exponent ("mirostat 2" of llama.cpp).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrunner.sampling.custom import Sampler, SamplingContext
from jaxrunner.sampling.random import gumbel
from jaxrunner.state.request_arrays import RequestArray


def _mirostat(scores: jax.Array, context: SamplingContext, keys: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    arrays = context.arrays
    surprise = -jax.nn.log_softmax(scores) / jnp.log(2.0)
    least = jnp.min(surprise, axis=-1)
    bound = jnp.maximum(2 * arrays["target"] + arrays["error"], least)
    kept = jnp.where(surprise <= bound[:, None], scores, -jnp.inf)
    ids = jnp.argmax(kept + gumbel(keys, scores.shape[1]), axis=-1).astype(jnp.int32)
    seen = jnp.take_along_axis(-jax.nn.log_softmax(kept) / jnp.log(2.0), ids[:, None], axis=1)[:, 0]
    return ids, {"error": arrays["error"] - arrays["rate"] * (seen - arrays["target"])}


mirostat = Sampler(
    _mirostat,
    name="mirostat",
    arrays=(
        RequestArray("target", default=5.0),
        RequestArray("rate", default=0.1),
        RequestArray("error", updated=True),
    ),
)
"""For requests with `extra_args={"mirostat": {"target": 3.0}}`. target: bits a token. rate: of the feedback. error: how
far the bound has moved from its start, 2 * target."""
