"""Grammar bitmask: what a structured output allows next."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from jaxrunner.sampling.packed_bits import unpack_bits


def mask_by_grammar(logits: Float32[Array, "B V"], bitmask: UInt32[Array, "B W"]) -> Float32[Array, "B V"]:
    """logits with -inf at every id whose bit is 0, see `packed_bits`; ids past the last word are forbidden.

    bitmask: of the batch's rows in batch order; a row without a grammar has all bits set. It comes first, so that
    log-probabilities of the model's own logits see it too.
    Source: vLLM, `apply_grammar_bitmask`.
    """
    return jnp.where(unpack_bits(bitmask, logits.shape[1]), logits, -jnp.inf)
