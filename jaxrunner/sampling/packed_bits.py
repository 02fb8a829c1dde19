"""Sets of token ids as bits: id v is bit v % 32 of word v // 32, the lowest bit first."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, UInt32

WORD = 32


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


def pack_bits(chosen: Bool[Array, "B V"]) -> UInt32[Array, "B W"]:
    """The words of each row; bits past the vocabulary are 0."""
    rows, vocab_size = chosen.shape
    padded = jnp.pad(chosen, ((0, 0), (0, num_words(vocab_size) * WORD - vocab_size)))
    bits = padded.reshape(rows, -1, WORD).astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


def unpack_bits(words: UInt32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """Which ids are in each row's set; ids past the words are in none."""
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)) & 1
    found = bits.reshape(words.shape[0], -1)[:, :vocab_size] == 1
    return jnp.pad(found, ((0, 0), (0, vocab_size - found.shape[1])))
