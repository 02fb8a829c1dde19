"""One token per row of logits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxrunner.compile.buckets import TIER_FEATURES, Feature, Tier
from jaxrunner.pallas.implementation import Implementation
from jaxrunner.sampling.constraints import constrain, has_no_id
from jaxrunner.sampling.custom import CustomRun
from jaxrunner.sampling.filters import best_id, chunk_maxima, draw, scale_and_filter
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logprobs import TokenLogprobs, token_logprobs
from jaxrunner.sampling.packed_bits import pack_bits
from jaxrunner.sampling.random import row_keys
from jaxrunner.sampling.replay import replayed
from jaxrunner.sampling.temperature import GREEDY_BELOW, divide, scale
from jaxrunner.state.sampling import SamplingState

NEED_MAXIMA = {Feature.FILTERS: "filters", Feature.LOGPROBS: "best_ids"}
"""What needs the greatest logit of each chunk, and the op whose kernel does."""


class Sampled(NamedTuple):
    """token_ids: i32[B], always inside the vocabulary.

    no_id_left: bool[B], rows whose constraints forbid every id, or whose custom sampler took one that is forbidden, so
    that their token means nothing; None in a tier without constraints and custom functions. sampling_mask: u32[B, W],
    the ids that each token was drawn from (`packed_bits`); logprobs: of the tokens, as `Reports` says; both None in a
    tier without them. scores: f32[B, V], what the tokens were drawn from, as softmax(scores). updates: new values of
    arrays that custom functions update.
    """

    token_ids: jax.Array
    no_id_left: jax.Array | None = None
    sampling_mask: jax.Array | None = None
    logprobs: TokenLogprobs | None = None
    scores: jax.Array | None = None
    updates: Mapping[str, jax.Array] = MappingProxyType({})


def sample_tokens(
    logits: Float[Array, "B V"],
    params: SamplingState,
    position: Int32[Array, "B"],
    *,
    tier: Tier,
    history: History | None = None,
    custom: CustomRun | None = None,
    implementation: Implementation = None,
) -> Sampled:
    """A token of each row.

    logits: of any floating type; all is computed in float32, and what reads them from memory reads them as they are.
    params: the rows' parameters in batch order. position: index the new token will have in its request. history: for
    tiers with constraints. custom: the user's processors and sampler; those that serve every request run in all tiers,
    the others from "constrained" on. implementation: of the filters with the draw from what they leave, and of the
    search for the best ids.
    tier "greedy": exact argmax, the lowest id on a tie. tier "random": rows with a temperature take the argmax of
    logits / temperature + Gumbel noise, which draws from the softmax; greedy rows as before. Tiers from "filtered" on
    filter before the draw, from "constrained" on the whole list of `jaxrunner.sampling` applies. A row's token is the
    same in every tier that covers what it asks for.
    """
    features, narrow, raw = TIER_FEATURES[tier], logits, logits.astype(jnp.float32)
    no_id_left: jax.Array | None = None
    updates: dict[str, jax.Array] = {}
    asked = Feature.CONSTRAINTS in features
    if asked:
        if history is None:
            raise ValueError(f"tier {tier!r} needs the history of its rows")
        logits, updates = constrain(raw, params, position, history, custom)
    elif custom is not None:
        logits, updates = custom.process(raw, asked=False)
    scores = wide = logits.astype(jnp.float32)
    maxima = None
    if op := next((op for feature, op in NEED_MAXIMA.items() if feature in features), None):
        maxima = chunk_maxima(wide, op=op, implementation=implementation)
    if asked or custom is not None:
        no_id_left = has_no_id(wide if maxima is None else maxima)
    tokens = best_id(wide, maxima)
    if Feature.DRAW in features:
        is_greedy = params.temperature < GREEDY_BELOW
        left = None
        if Feature.FILTERS in features:
            scores, left = scale_and_filter(logits, params, maxima)
        else:
            highest = None if maxima is None else jnp.max(maxima, axis=-1, keepdims=True)
            scores = scale(wide, params.temperature, highest)
        keys = row_keys(params.seed, position)
        drawn = draw(scores, keys, left, tokens, is_greedy)
        if custom is not None and no_id_left is not None:
            drawn, is_lost, new = custom.draw(scores, drawn, keys, asked=asked)
            no_id_left, updates = no_id_left | (is_lost & ~is_greedy), updates | new
        tokens = jnp.where(is_greedy, tokens, drawn)
        scores = jnp.where(is_greedy[:, None], wide, scores)
    if history is not None and no_id_left is not None:
        is_given, given = replayed(params.list_of("replay_ids"), position, history.prompt_len)
        tokens, no_id_left = jnp.where(is_given, given, tokens), no_id_left & ~is_given
    mask = pack_bits(scores != -jnp.inf) if Feature.SAMPLING_MASK in features else None
    logprobs = None
    if Feature.LOGPROBS in features:
        shown = _processed(params, wide, scores) if params.reports.is_processed else narrow
        named, known = params.list_of("logprob_ids"), maxima if shown is logits else None
        logprobs = token_logprobs(shown, tokens, named, params.reports, maxima=known, implementation=implementation)
    return Sampled(tokens, no_id_left, mask, logprobs, scores, updates)


def _processed(
    params: SamplingState, constrained: Float32[Array, "B V"], scores: Float32[Array, "B V"]
) -> Float32[Array, "B V"]:
    """What the tokens are drawn from. The softmax of `scores` is the same and keeps more digits, since their largest is
    0; as logits they would be off by that."""
    if not params.reports.is_logits:
        return scores
    return jnp.where(scores == -jnp.inf, scores, divide(constrained, params.temperature))
