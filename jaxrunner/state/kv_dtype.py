"""The types a KV cache can be stored in, by their names here and in vLLM."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrunner.errors import NotBuiltError

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
FLOAT8_BYTES = jnp.dtype(jnp.uint8)
"""The dtype of a float8 cache, which holds the bytes of its numbers, as vLLM's does. XLA neither gathers nor scatters
float8: it would widen the whole cache to float16 and narrow it again, at every write."""
FLOAT8_MAX = 448.0
"""The largest finite float8_e4m3fn: what larger values are stored as."""
NAMES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
}
"""Accepted name -> dtype, besides "auto"."""


def kv_dtype(kv_cache_dtype: str | None, model_dtype: str) -> np.dtype:
    """The dtype of a cache's arrays. None and "auto" are the model's; that of float8 is FLOAT8_BYTES.

    Raises NotBuiltError, with the names that exist, for any other kind of cache.
    """
    if kv_cache_dtype in (None, "auto"):
        return jnp.dtype(model_dtype)
    if kv_cache_dtype not in NAMES:
        raise NotBuiltError(f"kv_cache_dtype {kv_cache_dtype!r} is not built; use one of {', '.join(['auto', *NAMES])}")
    dtype = jnp.dtype(NAMES[kv_cache_dtype])
    return FLOAT8_BYTES if dtype == FLOAT8 else dtype


def is_float8(blocks: Any) -> bool:
    """Whether a cache holds float8."""
    return blocks.dtype == FLOAT8_BYTES


def to_bytes(values: jax.Array) -> jax.Array:
    """float8_e4m3fn -> what the cache holds."""
    return lax.bitcast_convert_type(values, FLOAT8_BYTES)


def from_bytes(data: jax.Array) -> jax.Array:
    """A part of a cache as numbers; of another type than float8 as it is."""
    return lax.bitcast_convert_type(data, FLOAT8) if is_float8(data) else data
