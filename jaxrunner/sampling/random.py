"""Random numbers of the sampler: a function of (request seed, position, token id) and of nothing else.

The key of a draw is threefry over the request's 64-bit seed, folded with the position of the new token and with the
number of the stream, so that neighbours, rows, batch sizes, buckets and preemption cannot change it. Bits of token id
v do not depend on the vocabulary's padding because `jax_threefry_partitionable` is on (JAX's default; asserted).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

TARGET, DRAFT, ACCEPT, RESIDUAL, USER = range(5)
"""Streams that must be independent: the target's draw, a drafter's, the acceptance test, the residual draw, and from
USER on those of a user's logits processors."""


def row_keys(seed: Int32[Array, "B 2"], position: Int32[Array, "B"], *, stream: int = TARGET) -> jax.Array:
    """One typed key per row. seed: low and high word. position: index the new token will have in its request."""
    if not jax.config.jax_threefry_partitionable:
        raise RuntimeError("jaxrunner's draws need jax_threefry_partitionable=True, which is JAX's default")
    words = lax.bitcast_convert_type(seed, jnp.uint32)[:, ::-1]
    keys = jax.random.wrap_key_data(words, impl="threefry2x32")
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(keys, position), jnp.full(position.shape, stream, jnp.int32))


def gumbel(keys: jax.Array, vocab_size: int) -> Float32[Array, "B V"]:
    """Standard Gumbel noise, one row a key."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32))(keys)
