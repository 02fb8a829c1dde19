"""min_p: a bound on probability relative to the best id's."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32


def min_p(scaled: Float32[Array, "B V"], fraction: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """scaled with -inf where exp(scaled), the probability relative to the largest, is below `fraction`.

    scaled: as `temperature.scale` leaves it, maximum 0. fraction: 0 is off; 1 keeps what ties with the best.
    Source: vLLM V2, `logit >= max + ln(min_p)`.
    """
    keep = scaled >= jnp.log(fraction)[:, None]
    return jnp.where(keep | (fraction <= 0)[:, None], scaled, -jnp.inf)
