"""Tracing and lowering in a process of its own, because Python does not get faster with threads.

A Mosaic kernel takes Python up to a second to lower, and every bucket has kernels of its own; XLA's part of the work,
in threads, would wait for that. The process sees no device: it traces for the described one and sends each program back
as an exported StableHLO module (`jax.export`), which its parent lowers again in milliseconds and compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
import time
from typing import Any, BinaryIO

import jax
import jax.export

from jaxrunner.compile.compiler import LoweredProgram
from jaxrunner.compile.programs import Program, Programs
from jaxrunner.pallas.custom_attention import custom
from jaxrunner.pallas.implementation import quick_lowering
from jaxrunner.pallas.target import Target, target, tracing_for
from jaxrunner.sampling.custom import NO_CUSTOM

CUSTOM_CALLS = ("mosaic_gpu_v2", "triton_kernel_call")
"""Kernels: calls whose form JAX does not promise to keep between versions, which here are the same on both sides."""
_NOT_ITS_OWN = ("platform", "device", "cache", "pjrt", "distributed", "num_processes")
"""Parts of the names of JAX's settings that a process without the device must not take over."""


MOST_PROCESSES = 8
PROGRAMS_A_PROCESS = 3
"""Fewer would be lowered here in the time that a process needs to start."""


def default_processes(programs: Programs, count: int) -> int:
    """How many processes pay for lowering `count` programs: none unless they are for a GPU that a process without it
    lowers Mosaic kernels for as one with it does (compute capability 9.0); and none for functions of the user's own,
    which may not be found by their names there, or for Triton's attention, which asks the device.
    """
    if target()[:2] != ("gpu", "9.0") or "triton" in str(programs.implementation):
        return 0
    if custom(programs.implementation) or programs.custom != NO_CUSTOM:
        return 0
    return min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, count // PROGRAMS_A_PROCESS)


class LoweringProcessError(Exception):
    """Why a process could not lower a program; it may well be lowered here."""


@dataclasses.dataclass
class Setup:
    """What the process needs to know once."""

    programs: Programs
    target: Target
    settings: dict[str, Any]


@dataclasses.dataclass
class Reply:
    """A program as a serialised module, numbers in the structure of its results, and seconds; or what went wrong."""

    module: bytes = b""
    results: Any = None
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    error: str = ""


class LoweringProcess:
    """Starts the process at once, waits for nothing. programs: without an attention of the user's own."""

    def __init__(self, programs: Programs):
        self._programs = programs
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(Setup(programs, target(), _settings()))

    def lower(self, program: Program) -> LoweredProgram:
        """Raises LoweringProcessError, after which the process is of no use."""
        self._send(program)
        try:
            reply: Reply = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise LoweringProcessError(f"the process has ended ({error})") from error
        if reply.error:
            raise LoweringProcessError(reply.error)
        started = time.perf_counter()
        lowered = imported(self._programs, program, reply)
        return LoweredProgram(
            program, lowered, reply.trace_seconds, reply.lower_seconds + time.perf_counter() - started
        )

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.communicate()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()
        except OSError as error:
            raise LoweringProcessError(f"the process has ended ({error})") from error


def exported(programs: Programs, program: Program) -> Reply:
    """One program, traced and lowered for the target."""
    run, arguments = programs.function(program)
    leaves, inputs = jax.tree.flatten(arguments)
    outputs = []

    def flat(*leaves: Any) -> tuple[Any, ...]:
        results, structure = jax.tree.flatten(run(*jax.tree.unflatten(inputs, leaves)))
        outputs.append(structure)
        return tuple(results)

    platform = "cuda" if target().platform == "gpu" else target().platform
    allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    started = time.perf_counter()
    jitted = jax.jit(flat)
    jitted.trace(*leaves)  # which the export finds traced
    between = time.perf_counter()
    with quick_lowering():
        module = jax.export.export(jitted, platforms=[platform], disabled_checks=allowed)(*leaves).serialize()
    results = jax.tree.unflatten(outputs[-1], range(outputs[-1].num_leaves))
    return Reply(bytes(module), results, between - started, time.perf_counter() - between)


def imported(programs: Programs, program: Program, reply: Reply) -> jax.stages.Lowered:
    """What `ProgramSet.trace(program).lower()` gives, from a reply: the same donation, the same names in errors."""
    module, structure = jax.export.deserialize(bytearray(reply.module)), jax.tree.structure(reply.results)
    function, shapes = programs.function(program)

    def run(*arguments: Any) -> Any:
        return jax.tree.unflatten(structure, module.call(*jax.tree.leaves(arguments)))

    run.__name__ = getattr(function, "func", function).__name__
    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return programs.jit(run, shapes).lower(*shapes)


def _settings() -> dict[str, Any]:
    """JAX's settings, for a process that is to trace as this one does."""
    plain = (bool, int, float, str, type(None))
    return {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, plain) and not any(part in name for part in _NOT_ITS_OWN)
    }


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the other side is gone."""
    setup: Setup = pickle.load(requests)
    for name, value in setup.settings.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    with tracing_for(setup.target), contextlib.suppress(EOFError):
        while True:
            program = pickle.load(requests)
            try:
                reply = exported(setup.programs, program)
            except Exception as error:
                reply = Reply(error=f"{type(error).__name__}: {error}")
            pickle.dump(reply, replies)
            replies.flush()


def main() -> None:
    """The process: speaks over the standard streams it was started with."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, answers)
