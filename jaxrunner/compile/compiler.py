"""From a program to its executable: loaded from the cache, or traced, lowered and compiled, each step timed."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import jax

from jaxrunner.compile.cache_key import Key, environment
from jaxrunner.compile.counter import persistent_hits
from jaxrunner.compile.entry import Entry, memory
from jaxrunner.compile.executable_cache import ExecutableCache
from jaxrunner.compile.options import compiler_options, other_options
from jaxrunner.compile.programs import Program, Programs
from jaxrunner.device_memory import return_freed_memory
from jaxrunner.pallas.implementation import quick_lowering

logger = logging.getLogger("jaxrunner")


@dataclasses.dataclass
class LoweredProgram:
    """A program between Python's part of the work and XLA's."""

    program: Program
    lowered: jax.stages.Lowered
    trace_seconds: float
    lower_seconds: float


class Compiler:
    """Makes the executables of `programs`. Holds no executable; safe to use from several threads.

    options: XLA options for all of them, over the measured ones. cache: None keeps nothing.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        options: dict[str, Any] | None = None,
        cache: ExecutableCache | None = None,
    ):
        self.programs = programs
        self.options = options
        self.cache = cache

    def make(self, program: Program) -> Entry:
        """Load it if it can be loaded, else compile it."""
        return self.load(program) or self.compile(self.lower(program))

    def cached(self, program: Program) -> bool:
        """Whether there is something to load; it may still be refused."""
        key = self._key(program)
        return key is not None and self.cache is not None and self.cache.holds(key)

    def load(self, program: Program) -> Entry | None:
        """From the cache, or None."""
        key = self._key(program)
        if key is None or self.cache is None:
            return None
        started = time.perf_counter()
        found = self.cache.load(key)
        if found is None:
            return None
        compiled, facts = found
        return Entry(program, compiled, load_seconds=time.perf_counter() - started, **facts)

    def lower(self, program: Program) -> LoweredProgram:
        """Trace and lower: Python's work, which threads do not speed up."""
        started = time.perf_counter()
        traced = self.programs.trace(program)
        between = time.perf_counter()
        with quick_lowering():
            lowered = traced.lower()
        return LoweredProgram(program, lowered, between - started, time.perf_counter() - between)

    def compile(self, todo: LoweredProgram) -> Entry:
        """XLA's work, outside of Python's lock; what comes out is kept in the cache."""
        hits, started = persistent_hits(), time.perf_counter()
        compiled = todo.lowered.compile(compiler_options=self._options(todo.program))
        seconds = time.perf_counter() - started
        return_freed_memory()
        facts = memory(compiled)
        # What JAX took from a cache of its own cannot be serialised whole: code of its fusions would be missing.
        if persistent_hits() == hits and self.cache is not None and (key := self._key(todo.program)):
            self.cache.store(key, compiled, facts)
        return Entry(todo.program, compiled, todo.trace_seconds, todo.lower_seconds, seconds, **facts)

    def trim_cache(self) -> None:
        """Keep the cache within its limit."""
        if self.cache is not None:
            self.cache.trim()

    def _options(self, program: Program) -> dict[str, Any]:
        measured = compiler_options(program.bucket) if program.bucket else other_options()
        return measured | (self.options or {})

    def _key(self, program: Program) -> Key | None:
        identity = self.programs.identity(program) if self.cache is not None else None
        if identity is None:
            return None
        options = {name: repr(value) for name, value in sorted(self._options(program).items())}
        return Key(str(program), {"program": identity, "options": options, **environment()})
