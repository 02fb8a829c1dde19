"""XLA options of an executable. They belong to the executable that they were measured for, never to the process."""

from __future__ import annotations

from typing import Any

import jax

from jaxrunner.compile.buckets import Bucket

LIBRARY_PRODUCTS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
"""Every matrix product by the library, in the way the library itself takes for the best. XLA would time some on the
GPU, one executable after the other, and no step ran faster for it. XLA's own products are generated, many of each to
choose from: that takes five times the processor time, which a start pays for every executable."""


def compiler_options(bucket: Bucket) -> dict[str, Any]:
    """The options the engine compiles `bucket` with on the default backend; `{}` on a CPU.

    For a jit of your own around `step`: `jax.jit(f, compiler_options=jaxrunner.compiler_options(bucket))`. It is right,
    and copies neither weights nor KV cache, without them as well.
    """
    # A lone request's matrix-vector products are all its step: XLA's own spared 1% of it, and nothing of larger ones.
    is_alone = bucket.kind == "decode" and bucket.num_tokens == 1
    return {} if is_alone else other_options()


def other_options() -> dict[str, Any]:
    """Options of an executable that is no step."""
    return dict(LIBRARY_PRODUCTS) if jax.default_backend() == "gpu" else {}
