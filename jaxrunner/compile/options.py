"""XLA options of an executable. They belong to the executable that they were measured for, never to the process."""

from __future__ import annotations

import jax

from jaxrunner.compile.buckets import Bucket

LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
"""Every matrix product by the library. XLA's own are generated, and timed against each other while it compiles: that
takes five times the processor time, which a start pays for every executable."""
GENERATED_PAYS = 16
"""Decodes of up to so many rows ran faster with XLA's own products, on an H200 for the Llama-3-8B shape; see
docs/performance.md."""


def compiler_options(bucket: Bucket) -> dict[str, bool]:
    """The options the engine compiles `bucket` with on the default backend, `{}` where XLA's own are best.

    For a jit of your own around `step`: `jax.jit(f, compiler_options=jaxrunner.compiler_options(bucket))`. It is right,
    and copies neither weights nor KV cache, without them as well.
    """
    if jax.default_backend() != "gpu":
        return {}
    if bucket.kind == "decode" and bucket.num_tokens <= GENERATED_PAYS:
        return {}
    return dict(LIBRARY_PRODUCTS)


def other_options() -> dict[str, bool]:
    """Options of an executable that is no step."""
    return dict(LIBRARY_PRODUCTS) if jax.default_backend() == "gpu" else {}
