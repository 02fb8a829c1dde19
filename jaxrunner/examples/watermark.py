"""A watermark: text that somebody with the key can tell from other text, and the detector.

Before each token its predecessor and a secret key divide the vocabulary into green and red ids, and green ids gain some
logits. Text without the watermark has green ids at the rate of `fraction`, watermarked text more.
Source: Kirchenbauer et al. 2023, "A Watermark for Large Language Models", the soft red list.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.sampling.custom import LogitsProcessor, SamplingContext
from jaxrunner.state.request_arrays import RequestArray


def green_ids(key: jax.Array, token_id: jax.Array, fraction: jax.Array, *, vocab_size: int) -> jax.Array:
    """bool[vocab_size]: ids that are green after `token_id`. key: u32, fraction: f32, part of the ids; all scalars."""
    words = jnp.stack([key, jnp.asarray(token_id, jnp.uint32)])
    drawn = jax.random.uniform(jax.random.wrap_key_data(words, impl="threefry2x32"), (vocab_size,))
    return drawn < fraction


def _watermark(logits: jax.Array, context: SamplingContext) -> jax.Array:
    key, fraction, gain = (context.arrays[name] for name in ("key", "fraction", "gain"))
    previous = context.last(1)[:, 0]
    is_green = jax.vmap(functools.partial(green_ids, vocab_size=logits.shape[1]))(key, previous, fraction)
    return jnp.where(is_green, logits + gain[:, None], logits)


watermark = LogitsProcessor(
    _watermark,
    name="watermark",
    arrays=(
        RequestArray("key", dtype="uint32", default=None),
        RequestArray("gain", default=2.0),
        RequestArray("fraction", default=0.5),
    ),
)
"""For requests with `extra_args={"watermark": {"key": 42}}`. gain: added to green logits; it is differentiable."""


def watermark_score(token_ids: Sequence[int], key: int, *, vocab_size: int, fraction: float = 0.5) -> float:
    """How many standard deviations the green ids of a text are above what chance gives; 4 and more is a watermark.

    token_ids: with the one before the text first, so that each other has a predecessor. Raises ValueError for fewer
    than two.
    """
    ids = jnp.asarray(token_ids, jnp.int32)
    if len(ids) < 2:
        raise ValueError(f"{len(ids)} token(s) have no predecessor; give at least two")
    word, part = jnp.uint32(key), jnp.float32(fraction)

    def is_green(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        return green_ids(word, pair[0], part, vocab_size=vocab_size)[pair[1]]

    count, total = int(np.sum(jax.lax.map(is_green, (ids[:-1], ids[1:])))), len(ids) - 1
    return (count - fraction * total) / (total * fraction * (1 - fraction)) ** 0.5
