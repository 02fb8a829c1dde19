"""One token per row of logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxrunner.compile.buckets import Tier, covers
from jaxrunner.sampling.min_p import min_p
from jaxrunner.sampling.min_tokens import mask_stop_ids
from jaxrunner.sampling.random import gumbel, row_keys
from jaxrunner.sampling.temperature import GREEDY_BELOW, is_sound, scale
from jaxrunner.sampling.top_k import top_k
from jaxrunner.sampling.top_p import top_p
from jaxrunner.state.sampling import SamplingState


def sample_tokens(
    logits: Float32[Array, "B V"], params: SamplingState, position: Int32[Array, "B"], *, tier: Tier
) -> Int32[Array, "B"]:
    """Sampled ids, i32[B], always inside the vocabulary.

    params: the rows' parameters in batch order. position: index the new token will have in its request.
    tier "greedy": exact argmax, the lowest id on a tie. tier "random": rows with a temperature take the argmax of
    logits / temperature + Gumbel noise, which draws from the softmax; greedy rows as before. Tiers from "filtered" on
    apply the whole list of `jaxrunner.sampling`. A row's token is the same in every tier that covers what it asks for.
    """
    if covers(tier, "filtered") and params.stop_ids is not None:
        logits = mask_stop_ids(logits, params.stop_ids, params.min_len, position)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if tier == "greedy":
        return greedy
    scaled = scale(logits, params.temperature)
    if covers(tier, "filtered"):
        scaled = apply_filters(scaled, params)
    noise = gumbel(row_keys(params.seed, position), logits.shape[-1])
    drawn = jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)
    return jnp.where(params.temperature < GREEDY_BELOW, greedy, drawn)


def apply_filters(scaled: Float32[Array, "B V"], params: SamplingState) -> Float32[Array, "B V"]:
    """scaled after min_p, top_k and top_p: -inf where a row's filter drops an id. Damaged rows stay as they are."""
    sound = is_sound(scaled)
    scaled = min_p(scaled, jnp.where(sound, params.min_p, 0))
    scaled = top_k(scaled, jnp.where(sound, params.top_k, 0))
    return top_p(scaled, jnp.where(sound, params.top_p, 0))
