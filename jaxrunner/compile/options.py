"""XLA options of an executable. They belong to the executable that they were measured for, never to the process."""

from __future__ import annotations

import jax

from jaxrunner.compile.buckets import Bucket

LIBRARY_GEMMS = {"xla_gpu_enable_triton_gemm": False}
"""Every matrix product by the library: XLA's own generated ones come with a kernel more for the sum of their parts."""
MEASURED: tuple[tuple[int, int, dict[str, bool]], ...] = ((33, 128, LIBRARY_GEMMS),)
"""(fewest tokens, most tokens, options) that were faster than XLA's defaults on an H200 for the Llama-3-8B shape; see
docs/performance.md. Other sizes take the defaults."""


def compiler_options(bucket: Bucket) -> dict[str, bool]:
    """The options the engine compiles `bucket` with on the default backend, `{}` where XLA's own are best.

    For a jit of your own around `step`: `jax.jit(f, compiler_options=jaxrunner.compiler_options(bucket))`. It is right,
    and copies neither weights nor KV cache, without them as well.
    """
    return options_for(bucket.num_tokens)


def options_for(num_tokens: int) -> dict[str, bool]:
    """Options of an executable whose matrix products have `num_tokens` rows."""
    if jax.default_backend() != "gpu":
        return {}
    return next((dict(options) for least, most, options in MEASURED if least <= num_tokens <= most), {})
