"""The types a KV cache can be stored in, by their names here and in vLLM."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import NotBuiltError

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
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
    """The dtype of a cache. None and "auto" are the model's.

    Raises NotBuiltError, with the names that exist, for any other kind of cache.
    """
    if kv_cache_dtype in (None, "auto"):
        return jnp.dtype(model_dtype)
    if kv_cache_dtype not in NAMES:
        raise NotBuiltError(f"kv_cache_dtype {kv_cache_dtype!r} is not built; use one of {', '.join(['auto', *NAMES])}")
    return jnp.dtype(NAMES[kv_cache_dtype])
