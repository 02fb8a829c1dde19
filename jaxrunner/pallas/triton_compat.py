"""Every call into Triton and jax-triton goes through this file, so that one place knows which version has which API.

A kernel runs on an NVIDIA GPU of compute capability 8.0 or newer. In a process that started with TRITON_INTERPRET=1 it
runs on the CPU instead, in Triton's interpreter and without jax-triton, some milliseconds for each program and tile of
keys. Anywhere else it refuses to trace.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import os
from typing import Any

import jax
import numpy as np

from jaxrunner.pallas.compat import capability
from jaxrunner.pallas.target import target

MINIMUM_COMPUTE_CAPABILITY = (8, 0)
INSTALL = "pip install 'jaxrunner[triton]'"


def interpreting() -> bool:
    """Whether Triton runs its kernels in its interpreter; it decides that when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unavailable_reason() -> str | None:
    """Why Triton kernels cannot be built in this process, or None."""
    packages = ("triton",) if interpreting() else ("triton", "jax_triton")
    missing = [name.replace("_", "-") for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs {' and '.join(missing)}, which the extra installs: {INSTALL}"
    return None


def refusal() -> str | None:
    """Why a Triton kernel cannot be traced here and now, or None."""
    if (reason := unavailable_reason()) or interpreting():
        return reason
    if (platform := target().platform) != "gpu":
        return f"the backend is {platform!r}; it needs an NVIDIA GPU and the extra: {INSTALL}"
    if (found := capability()) < MINIMUM_COMPUTE_CAPABILITY:
        text = ".".join(map(str, found))
        return f"it needs compute capability 8.0 or newer, this GPU has {text}" if found else "it needs NVIDIA's"
    return None


def small_shared_memory() -> bool:
    """Whether a CTA has about 100 KB of shared memory (8.6, 8.9, 12.x), not 160 or more (8.0, 9.0, 10.x)."""
    return not interpreting() and capability() not in ((8, 0), (8, 7), (9, 0), (10, 0), (10, 3))


def num_cores() -> int:
    """Multiprocessors of the GPU, or those of an A100."""
    return target().num_cores or 108


def call(
    module: str,
    kernel: str,
    *args: jax.Array,
    out: Any,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Launch a kernel; its parameters are `args`, then the outputs, then the constants by name.

    module, kernel: where it is, by name, since importing it needs Triton. out: a tuple of
    ShapeDtypeStructs.
    """
    function = getattr(importlib.import_module(module), kernel)
    if interpreting():
        run = functools.partial(_interpret, function, out, grid, constants)
        return jax.pure_callback(run, out, *args, vmap_method="sequential")
    import jax_triton

    named = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    return jax_triton.triton_call(
        *args, kernel=function, **{named: out}, grid=grid, num_warps=num_warps, num_stages=num_stages, **constants
    )


def _interpret(kernel: Any, out: Any, grid: tuple[int, ...], constants: dict[str, Any], *args: Any) -> tuple[Any, ...]:
    """Outputs begin as NaN, so that what a kernel does not write is seen."""
    results = tuple(np.full(o.shape, np.nan, o.dtype) for o in out)
    arrays = [np.asarray(a) for a in args]
    kernel[grid](*map(_HostArray, itertools.chain(arrays, results)), **constants)
    return results


class _HostArray:
    """What Triton's interpreter wants of a tensor, over a NumPy array that is on the host already."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _itself(self, *args: Any, **named: Any) -> _HostArray:
        return self

    untyped_storage = cpu = new_empty = set_ = copy_ = storage_offset = size = stride = _itself
