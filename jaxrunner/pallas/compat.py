"""Every call into Pallas Mosaic GPU goes through this file, so that one place knows which JAX has which API.

A kernel is built in one of three settings, and refuses to trace in any other:

- on a machine with a Hopper (or newer) GPU;
- under `lower_for_cuda`, which runs the complete Pallas lowering on any machine but runs nothing;
- under `interpreting`, which runs the kernel on the CPU, about 0.1 s for each CTA.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas.target import target

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
    if (platform := target().platform) != "gpu":
        return (
            f"the backend is {platform!r}, not 'gpu'. Use implementation='xla', or run it under "
            "jaxrunner.pallas.compat.interpreting() or lower_for_cuda() to test it without a GPU"
        )
    if capability() < MINIMUM_COMPUTE_CAPABILITY:
        return f"it needs compute capability 9.0 (Hopper) or newer, this GPU has {_capability_text()}"
    return None


def tensor_core_refusal() -> str | None:
    """Why a kernel with the tensor core instructions of Hopper cannot be traced here and now, or None."""
    if (reason := refusal()) or _interpreting.get() or _abstract_gpu():
        return reason
    if capability() != MINIMUM_COMPUTE_CAPABILITY:
        return f"it uses instructions of compute capability 9.0 (Hopper) only, this GPU has {_capability_text()}"
    return None


def capability() -> tuple[int, ...]:
    """Compute capability of the GPU that is traced for, e.g. (9, 0); empty where it is not NVIDIA's."""
    parts = target().compute_capability.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _capability_text() -> str:
    return target().compute_capability or "none"


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

    Raises ImplementationError too where shared memory was given a swizzle that its slices would break.

    avals: arguments or ShapeDtypeStructs. device_kind, num_cores: the device, an H200 by default.
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind, platform="gpu", num_cores=num_cores)
    with (
        quick_lowering(),
        _refusing_short_swizzled_tiles(),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)),
    ):
        return jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",))


_lowering = threading.Lock()
_restore = contextlib.ExitStack()
_threads_lowering = 0


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Mosaic kernels lowered inside come out the same, bit for bit, in about half the time.

    JAX's layout inference assigns one layout at a time and goes through all constraints after each, prints operations
    to put them in order, and derives the same layouts and transfers over and over. Here, what the kernel's own layout
    casts lead to is assigned at once, and what was derived is remembered until the lowering is over. Where casts
    contradict each other JAX searches as ever; a JAX without one of these functions is left as it is. Several threads
    may be inside; what others lower meanwhile comes out the same, too.
    """
    global _threads_lowering
    if unavailable_reason():
        yield
        return
    with _lowering:
        if not _threads_lowering:
            for owner, name, quicker in _quicker_functions():
                _restore.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, quicker)
        _threads_lowering += 1
    try:
        yield
    finally:
        with _lowering:
            _threads_lowering -= 1
            if not _threads_lowering:
                _restore.close()


def _quicker_functions() -> list[tuple[Any, str, Any]]:
    """(owner, name, what to put there) of parts of JAX 0.11; empty where one of them is missing."""
    try:
        from jax.experimental.mosaic.gpu import constraints, fragmented_array, layout_inference, layouts

        saturate = constraints.saturate_divides_constraints_for_equal_vars
        find = layout_inference.find_assignments_for
        candidates = layout_inference._extract_variable_assignments_from_constraints
        transfer, tiled = constraints.IsTransferableSmemRegisters, fragmented_array.TiledLayout
        derived = [(transfer, "_constant_holds"), (tiled, "canonicalize"), (layouts, "from_layout_attr")]
        remembered = [(owner, name, functools.cache(getattr(owner, name))) for owner, name in derived]
    except (ImportError, AttributeError):
        return []

    def is_untiled(layout):
        return isinstance(layout, constraints.RegisterLayout) and not isinstance(layout.value, tiled)

    def follow_casts(system, arch):
        """The system with all that layout casts lead to, in the search's order; None where they contradict."""
        while not isinstance(system := constraints.reduce(system), constraints.Unsatisfiable):
            casts = [c for c in system.constraints if isinstance(c, constraints.Relayout)]
            others = [c for c in system.constraints if not isinstance(c, constraints.Relayout)]
            by_casts: dict[bool, dict[Any, Any]] = {False: {}, True: {}}
            for value, layout in candidates(casts, arch):
                by_casts[is_untiled(layout)].setdefault(value, layout)
            assignments = by_casts[False]
            if not assignments and all(is_untiled(layout) for _, layout in candidates(others, arch)):
                assignments = by_casts[True]  # which the search tries when no tiled layout is left to try
            if not assignments:
                return system
            if not all(constraints.is_valid_assignment(*assignment) for assignment in assignments.items()):
                return None
            system = constraints.ConstraintSystem(assignments=assignments) & system
        return None

    def find_quickly(unknowns, system, **search):
        if isinstance(unknowns, dict):  # the search calls itself
            return find(unknowns, system, **search)
        unknowns = dict.fromkeys(unknowns)  # it looks each value up in them
        if (followed := follow_casts(system, search["arch"])) is not None:
            with contextlib.suppress(ValueError):  # it has searched for too long
                solution = find(unknowns, saturate(followed), **search)
                if not isinstance(solution[0], constraints.Unsatisfiable):
                    return solution
        return find(unknowns, saturate(system), **search)

    return [
        # The last step before the search, which prints operations: done by `find_quickly`, when there is little left.
        (constraints, "saturate_divides_constraints_for_equal_vars", lambda system: system),
        (layout_inference, "find_assignments_for", find_quickly),
        *remembered,
    ]


@contextlib.contextmanager
def _refusing_short_swizzled_tiles() -> Iterator[None]:
    """Layout inference may choose swizzled tiles of fewer than 8 rows for memory without declared transforms.

    The swizzle has a period of 8 rows, and a slice at another row gets its phase wrong: right in the interpreter,
    wrong on a GPU, and nothing complains. See `row_major_smem`.
    """
    from jax.experimental.mosaic.gpu import layout_inference

    infer = layout_inference.infer_layout

    def infer_and_check(module, *args, **kwargs):
        infer(module, *args, **kwargs)
        for tile in re.findall(r"#mosaic_gpu\.tile<\[([\d, ]+)\]>, #mosaic_gpu\.swizzle<(?!16 )", str(module)):
            if any(int(size) % 8 for size in tile.split(",")[-2:]):
                raise ImplementationError(f"layout inference swizzles shared memory in tiles of {tile} elements")

    layout_inference.infer_layout = infer_and_check
    try:
        yield
    finally:
        layout_inference.infer_layout = infer


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    grid: tuple[int, ...] = (),
    grid_names: tuple[str, ...] = (),
    scratch_types: Any = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    approx_math: bool = False,
    auto_barriers: bool = True,
    reduction_bytes: int = 2048,
) -> Callable[..., Any]:
    """`plgpu.kernel`: `body` gets references to the operands, the outputs and the scratch of one CTA.

    Its name is the kernel's name in a profile. approx_math: exp2, tanh and the like by the special function unit.
    auto_barriers: a barrier of the warpgroup around each ordinary store; without, `commit` has to order them.
    reduction_bytes: shared memory for reductions across warps, of which 1024 are what one register a thread needs.
    Raises ImplementationError with the reason where it cannot be traced.
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
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            unsafe_no_auto_barriers=not auto_barriers,
            reduction_scratch_bytes=reduction_bytes,
        ),
    )


def ds(start: Any, size: int) -> Any:
    """Slice of `size` elements from a dynamic `start`; no alignment needed for a vector of strided layout."""
    return pl.ds(start, size)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Decorator: the function runs if the scalar `condition` holds."""
    return pl.when(condition)


def strided(size: int, itemsize: int = 4) -> Any:
    """Layout of a vector of `size` elements (a multiple of 128), in words of up to 16 bytes a thread and load."""
    vec_size = next(n for n in (16, 8, 4, 2, 1) if n * itemsize <= 16 and size % (n * LANES) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vec_size)


def load(ref: Any, *, layout: Any = None, optimized: bool = True) -> jax.Array:
    """An array from a reference in GMEM or SMEM, in the given layout.

    optimized: refuse a layout that SMEM cannot serve without bank conflicts; a matrix in GMEM needs False.
    """
    return plgpu.load(ref, layout=layout, optimized=optimized)


def iota(size: int) -> jax.Array:
    """i32[size] 0, 1, 2, ... in strided layout."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=strided(size))


def full(size: int, scalar: Any) -> jax.Array:
    """A scalar spread over i32[size] in strided layout; kernels know no implicit broadcast of a traced scalar.

    The explicit layout matters: without it the store of a constant picks one that does not fit 640 elements.
    """
    return plgpu.layout_cast(lax.broadcast_in_dim(jnp.asarray(scalar, jnp.int32), (size,), ()), strided(size))


def interpreted() -> bool:
    """Whether a kernel traced now is for the interpreter, which takes operands of a product from SMEM only."""
    return _interpreting.get()


def loop(start: Any, stop: Any) -> Callable[[Callable[[Any], None]], None]:
    """Decorator: the function runs for each i32 from start to stop - 1."""
    return pl.loop(start, stop)


def in_place(array: jax.Array) -> Any:
    """A mutable reference to `array`; pass it to a kernel that writes it in place, then read it with `[...]`.

    The kernel's custom call aliases its output to it; nothing is copied where `array` is dead or donated.
    """
    return jax.new_ref(array)


# Shared memory and its asynchronous copies.


def row_major_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of rows one after the other; any rows may be sliced. Rows are 8 elements longer than asked for.

    The tiles, of one row and 8 columns, leave it row-major and forbid JAX's layout inference to choose others. It
    would swizzle the memory when a matrix in `tile_layout` passes through, in tiles as short as the slices, and a
    slice that begins at no multiple of 8 rows would be out of phase. The padding spares bank conflicts.
    """
    columns = shape[-1] + 8
    if columns % 8:
        raise ImplementationError(f"rows of {shape[-1]} elements are no multiple of 8")
    return plgpu.SMEM((*shape[:-1], columns), dtype, transforms=(plgpu.TilingTransform((1, 8)),))


def words(shape: tuple[int, ...]) -> Any:
    """i32 shared memory that is read and written number by number."""
    return plgpu.SMEM(shape, jnp.int32)


def swizzle_of(columns: int, dtype: Any) -> int | None:
    """Bytes of the widest swizzle (128, 64, 32) that divides a row of `columns` elements, or None."""
    row = columns * jnp.dtype(dtype).itemsize
    return next((n for n in (128, 64, 32) if row % n == 0), None)


def swizzled_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the tiles that the tensor core and the copy engine share; slices are whole 8-row tiles."""
    swizzle = swizzle_of(shape[-1], dtype)
    if swizzle is None:
        raise ImplementationError(f"rows of {shape[-1]} x {jnp.dtype(dtype).name} are no multiple of 32 bytes")
    tile = (8, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)))


def barriers(count: int = 1, arrivals: int = 1) -> Any:
    """`count` barriers that complete after `arrivals` arrivals each, a copy or a warpgroup being one."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def copy_in(source: Any, target: Any, barrier: Any) -> None:
    """Asynchronous copy GMEM -> SMEM by the copy engine; arrives at `barrier` when done.

    Raises ImplementationError where the target is known to be no whole 8-row tiles of swizzled memory: the copy would
    swizzle from the slice's first row on, its readers from the tile's. The interpreter does not swizzle.
    """
    if not _whole_tiles(target):
        raise ImplementationError(f"a copy to rows of swizzled memory that are no whole tiles of 8: {target}")
    plgpu.copy_gmem_to_smem(source, target, barrier)


def is_last(counter: Any, count: Any) -> Any:
    """Adds 1 to a number in GMEM; whether that makes it `count`. For the CTA of which it does, of one warpgroup each,
    all that the others wrote before they came here is there to be read."""
    if interpreted():  # CTAs run one after the other
        arrived = counter[...] + 1
        counter[...] = arrived
        return arrived == count
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=scalar)
    def arrive_and_compare(_, ref, last):
        i32 = ir.IntegerType.get_signless(32)
        utils.warpgroup_barrier()
        chosen = arith.extui(i32, utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP))
        # One thread counts, a barrier with a reduction tells the others.
        result = llvm.inline_asm(
            i32,
            [utils.memref_ptr(ref), chosen, last.registers.item()],
            "{ .reg .pred me, yes; .reg .u32 before; setp.ne.u32 me, $2, 0; mov.u32 before, 0; "
            "@me atom.acq_rel.gpu.global.add.u32 before, [$1], 1; setp.eq.and.u32 yes, before, $3, me; "
            "bar.red.or.pred yes, 15, 128, yes; selp.u32 $0, 1, 0, yes; }",
            "=r,l,r,r",
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(result, shape=(), is_signed=True)

    return arrive_and_compare(counter, count - 1) == 1


def _whole_tiles(ref: Any) -> bool:
    """Whether slices of swizzled memory begin and end at whole tiles of 8 rows, as far as they are static."""
    from jax._src.pallas.mosaic_gpu.core import UnswizzleRef

    transforms = getattr(ref, "transforms", ())
    if not any(isinstance(transform, UnswizzleRef) for transform in transforms):
        return True
    rows = [transform.indices[-2] for transform in transforms if len(getattr(transform, "indices", ())) >= 2]
    for index in rows:
        start, size = getattr(index, "start", index), getattr(index, "size", 1)
        if size % 8 or (isinstance(start, int) and start % 8):
            return False
    return True


def arrive(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)


def wait(barrier: Any) -> None:
    plgpu.barrier_wait(barrier)


def commit() -> None:
    """Ordinary SMEM accesses of this warpgroup before are done and visible to its threads and the tensor core after."""
    plgpu.commit_smem()


def commit_gmem() -> None:
    """What this warpgroup has written to GMEM is there for its threads and for copies that they begin after."""
    if interpreted():
        return
    from jax.experimental.mosaic.gpu import utils

    @plgpu.inline_mgpu()
    def fence(_):
        utils.inline_ptx("fence.proxy.async;", has_side_effects=True)
        utils.warpgroup_barrier()

    fence()


def set_registers(count: int, action: str) -> None:
    """Registers of each thread of this warpgroup; action is "increase" or "decrease"."""
    plgpu.set_max_registers(count, action=action)


# Values in registers.


def tile_layout() -> Any:
    """Layout of a matrix in the tensor core's registers: rows a multiple of 64, columns of 8."""
    return plgpu.Layout.WGMMA


def row_layout() -> Any:
    """Layout of one number a row of such a matrix."""
    return plgpu.Layout.WGMMA.reduce(1)


@functools.cache
def rows_layout(rows: int, columns: int, itemsize: int, *, in_smem: bool = False) -> Any:
    """Layout of a short, wide matrix for coalesced accesses to GMEM: up to 16 bytes a thread, no thread idle.

    Where the matrix is too small for all threads, warps or lanes hold it more than once. in_smem: it also passes
    through `row_major_smem` of that many columns, where a store with bank conflicts is refused.
    """
    best = None
    for vector in (16, 8, 4, 2, 1):
        for lanes in (32, 16, 8, 4, 2, 1):
            if columns % (vector * lanes) or vector * itemsize > 16:
                continue
            for warp_rows in (n for n in (32, 16, 8, 4, 2, 1) if n <= 32 // lanes):
                if in_smem and _conflicts(vector * itemsize, lanes, warp_rows, (columns + 8) * itemsize):
                    continue
                for warps in (n for n in (4, 2, 1) if rows % (n * warp_rows) == 0):
                    busy = warps * warp_rows * lanes
                    score = (busy, vector * lanes * itemsize >= 64, vector * itemsize)
                    if best is None or score > best[0]:
                        best = (score, vector, lanes, warp_rows, warps)
    assert best is not None
    return _rows_layout(*best[1:])


def _conflicts(size: int, lanes: int, warp_rows: int, pitch: int) -> bool:
    """Whether threads that SMEM serves at once want different words of a bank. size: bytes a thread. pitch: of rows."""
    copies = 32 // (lanes * warp_rows)
    at_once = 32 * 4 // max(size, 4)
    bank = min(size, 4)
    for first in range(0, 32, at_once):
        places = [divmod(thread // copies, lanes) for thread in range(first, first + at_once)]
        addresses = {row * pitch + lane * size for row, lane in places}
        if len({address // bank % (128 // bank) for address in addresses}) < len(addresses):
            return True
    return False


def _rows_layout(vector: int, lanes: int, warp_rows: int, warps: int) -> Any:
    from jax.experimental.mosaic.gpu import fragmented_array

    # Dimensions after tiling: ..., warps, 1, warp_rows, lanes, 1, 1, vector.
    columns = lanes * vector
    tiling = plgpu.Tiling(((warps * warp_rows, columns), (warp_rows, columns), (1, vector), (vector,)))
    copies = 32 // (lanes * warp_rows)
    warp_dims = (-7,) if warps == 4 else (-7, plgpu.Replicated(4 // warps))
    lane_dims = (-5, -4) if copies == 1 else (-5, -4, plgpu.Replicated(copies))
    layout = fragmented_array.TiledLayout(tiling, warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def with_layout(value: jax.Array, layout: Any) -> jax.Array:
    return plgpu.layout_cast(value, layout)


def spread(vector: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """A vector along `axis` of a matrix, repeated along the other. Saying the layout spares its inference a search."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, (axis,)), layout)


def filled(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A constant in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def repeated(scalar: jax.Array, shape: tuple[int, ...], layout: Any) -> jax.Array:
    """A traced scalar in every element of a vector or matrix; kernels know no implicit broadcast of one."""
    return plgpu.layout_cast(lax.broadcast_in_dim(scalar, shape, ()), layout)


def index_of(shape: tuple[int, ...], axis: int) -> jax.Array:
    """i32 row (axis 0) or column (axis 1) index of each element of a matrix in `tile_layout`."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def matmul(a: Any, b: Any, *, before_wait: Callable[[], None] | None = None) -> jax.Array:
    """a @ b in float32 by the tensor core, b in SMEM. before_wait: runs after issue, before the result is awaited."""

    def body(acc):
        plgpu.wgmma(acc, a, b)
        if before_wait is not None:
            before_wait()
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def matmul_add(acc: jax.Array, a: Any, b: Any) -> jax.Array:
    """acc + a @ b by the tensor core; not in the interpreter."""

    def body(ref):
        plgpu.wgmma(ref, a, b)

    return pl.run_state(body)(plgpu.ACC.init(acc))


def _abstract_gpu() -> bool:
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device is not None and device.platform == "gpu"
