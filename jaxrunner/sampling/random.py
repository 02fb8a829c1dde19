"""Random numbers of the sampler: a function of (request seed, position, token id) and of nothing else.

The key of a draw is threefry over the request's 64-bit seed, folded with the position of the new token and with the
number of the stream, so that neighbours, rows, batch sizes, buckets and preemption cannot change it. Bits of token id
v do not depend on the vocabulary's padding because `jax_threefry_partitionable` is on (JAX's default; asserted).

The noise of a row is `jax.random.gumbel`'s; of single ids `gumbel_of` computes it, also inside a kernel, bit for bit:
threefry and the uniform number are exact, and XLA and Mosaic take the same logarithm (libdevice's, whose every product
and sum is rounded by an instruction of its own, so that no compiler can contract them in another way).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
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
    return jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,), jnp.float32, mode="low"))(keys)


def gumbel_of(words: tuple[jax.Array, jax.Array], ids: jax.Array) -> jax.Array:
    """f32, the numbers that `gumbel` has for these ids, -4.5 to 16. words: u32, both of a key, shaped as ids or (not in
    a kernel) so that they broadcast to them. ids: u32 of any shape.
    """
    return gumbel_from(threefry(words, ids))


def threefry(words: tuple[jax.Array, jax.Array], ids: jax.Array) -> jax.Array:
    """u32, 32 random bits for each id: both words of threefry-2x32 with 20 rounds over (0, id), by exclusive or.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
    """
    schedule = (*words, words[0] ^ words[1] ^ 0x1BD11BDA)
    first, second = words[0], ids + words[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            first = first + second
            second = first ^ ((second << rotation) | (second >> (32 - rotation)))
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + (group + 1)
    return first ^ second


def gumbel_from(bits: jax.Array) -> jax.Array:
    """f32, the Gumbel numbers that `jax.random.gumbel` makes of u32 random bits, of which it takes the upper 23."""
    # 1.0 <= x < 2.0. Below the least normal number there is only 0, which has no logarithm.
    uniform = lax.bitcast_convert_type((bits >> 9) | 0x3F800000, jnp.float32) - 1.0
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
