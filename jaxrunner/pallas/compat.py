"""Every call into Pallas Mosaic GPU goes through this file, so that one place knows which JAX has which API.

A kernel is built in one of three settings, and refuses to trace in any other:

- on a machine with a Hopper (or newer) GPU;
- under `lower_for_cuda`, which runs the complete Pallas lowering on any machine but runs nothing;
- under `interpreting`, which runs the kernel on the CPU, about 0.1 s for each CTA.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.errors import ImplementationError

try:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError as error:  # a jaxlib without the Mosaic GPU dialect
    pl = plgpu = None
    _import_error = str(error)

MINIMUM_JAX = (0, 11)
MINIMUM_COMPUTE_CAPABILITY = (9, 0)
LANES = 128
"""Threads of a warpgroup; a vector in a kernel has a multiple of this many elements."""
CUSTOM_CALL = "mosaic_gpu_v2"
"""Name of a kernel's custom call in lowered text."""

_interpreting = contextvars.ContextVar("interpreting", default=False)


def unavailable_reason() -> str | None:
    """Why Mosaic GPU kernels cannot be built with the installed JAX, or None."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < MINIMUM_JAX:
        return f"it needs jax {MINIMUM_JAX[0]}.{MINIMUM_JAX[1]} or newer (Python 3.12), this is {jax.__version__}"
    return f"this jaxlib has no Mosaic GPU: {_import_error}" if plgpu is None else None


def refusal() -> str | None:
    """Why a Mosaic GPU kernel cannot be traced here and now, or None."""
    if reason := unavailable_reason():
        return reason
    if _interpreting.get() or _abstract_gpu():
        return None
    if jax.default_backend() != "gpu":
        return (
            f"the backend is {jax.default_backend()!r}, not 'gpu'. Use implementation='xla', or run it under "
            "jaxrunner.pallas.compat.interpreting() or lower_for_cuda() to test it without a GPU"
        )
    capability = str(getattr(jax.devices()[0], "compute_capability", "none"))
    parts = capability.split(".")
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MINIMUM_COMPUTE_CAPABILITY:
        return f"it needs compute capability 9.0 (Hopper) or newer, this GPU has {capability}"
    return None


@contextlib.contextmanager
def interpreting(*, detect_races: bool = False) -> Iterator[None]:
    """Kernels traced inside run on the CPU in Pallas's interpreter.

    Fetch the results inside: an error then surfaces here, where the interpreter's global state is reset; left as it
    is, later interpretations would fail too. Raises ImplementationError where Mosaic GPU is not available.
    """
    if reason := unavailable_reason():
        raise ImplementationError(f"Mosaic GPU kernels cannot be interpreted: {reason}")
    token = _interpreting.set(True)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield
    except BaseException:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        gpu_callbacks.reset_gpu_interpret_mode_state()
        raise
    finally:
        _interpreting.reset(token)


def lower_for_cuda(
    f: Callable[..., Any], *avals: Any, device_kind: str = "NVIDIA H200", num_cores: int = 132
) -> jax.stages.Lowered:
    """`f` traced and lowered for a CUDA device that need not exist; raises what the lowering on a GPU would raise.

    avals: arguments or ShapeDtypeStructs. device_kind, num_cores: the device, an H200 by default.
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind, platform="gpu", num_cores=num_cores)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",))


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: tuple[int, ...] = (),
    grid_names: tuple[str, ...] = (),
    scratch_types: Any = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    compiler_params: Any = None,
) -> Callable[..., Any]:
    """`plgpu.kernel`: `body` gets references to the operands, the outputs and the scratch of one CTA.

    Its name is the kernel's name in a profile. Raises ImplementationError with the reason where it cannot be traced.
    """
    if reason := refusal():
        raise ImplementationError(f"the Mosaic GPU kernel {body.__name__} cannot run here: {reason}")
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=grid_names,
        scratch_types=scratch_types,
        num_threads=num_threads,
        thread_name=thread_name,
        compiler_params=compiler_params,
    )


def ds(start: Any, size: int) -> Any:
    """Slice of `size` elements from a dynamic `start`; no alignment needed for a vector of strided layout."""
    return pl.ds(start, size)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: the function runs if the scalar `condition` holds."""
    return pl.when(condition)


def strided(size: int) -> Any:
    """Layout of a vector of `size` elements (a multiple of 128), in words of up to 16 bytes a thread and load."""
    vec_size = next(n for n in (4, 2, 1) if size % (n * LANES) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vec_size)


def load(ref: Any, *, layout: Any = None) -> jax.Array:
    """A vector from a reference in GMEM or SMEM, in the given layout."""
    return plgpu.load(ref, layout=layout)


def iota(size: int) -> jax.Array:
    """i32[size] 0, 1, 2, ... in strided layout."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=strided(size))


def full(size: int, scalar: Any) -> jax.Array:
    """A scalar spread over i32[size] in strided layout; kernels know no implicit broadcast of a traced scalar.

    The explicit layout matters: without it the store of a constant picks one that does not fit 640 elements.
    """
    return plgpu.layout_cast(lax.broadcast_in_dim(jnp.asarray(scalar, jnp.int32), (size,), ()), strided(size))


def _abstract_gpu() -> bool:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device is not None and device.platform == "gpu"
