"""Grammar bitmask: what a structured output allows next."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt32

from jaxrunner.sampling.packed_bits import WORD, unpack_bits


def mask_by_grammar(logits: Float[Array, "B V"], bitmask: UInt32[Array, "B W"]) -> Float[Array, "B V"]:
    """logits with -inf at every id whose bit is 0, see `packed_bits`; ids past the last word are forbidden.

    bitmask: of the batch's rows in batch order; a row without a grammar has all bits set. It comes first, so that
    log-probabilities of the model's own logits see it too.
    Source: vLLM, `apply_grammar_bitmask`.
    """
    return jnp.where(unpack_bits(bitmask, logits.shape[1]), logits, -jnp.inf)


def is_allowed(bitmask: UInt32[Array, "B W"], token_ids: Int32[Array, "B"]) -> Bool[Array, "B"]:
    """Whether each row's mask has its id. Of masked logits only a row without a finite one gives another id."""
    place = token_ids[:, None] // WORD
    words = jnp.take_along_axis(bitmask, jnp.minimum(place, bitmask.shape[1] - 1), axis=1)[:, 0]
    bit = (words >> (token_ids % WORD).astype(jnp.uint32)) & 1
    return (bit == 1) & (place[:, 0] < bitmask.shape[1])
