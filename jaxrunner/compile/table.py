"""`BucketTable`: the compiled executables of one runner, what each cost to make and how often it was used."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import time
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import jax
import numpy as np

from jaxrunner.compile.options import options_for
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.compile.progress import Report, reporting
from jaxrunner.device_memory import return_freed_memory
from jaxrunner.errors import BucketMissError
from jaxrunner.pallas.custom_attention import custom, name_of

Policy = Literal["compile", "next_larger", "refuse"]
POLICIES: tuple[Policy, ...] = ("compile", "next_larger", "refuse")
logger = logging.getLogger("jaxrunner")


@dataclasses.dataclass
class Entry:
    """One executable: seconds to make it, bytes it needs, and its use so far."""

    program: Program
    compiled: Any
    lower_seconds: float
    compile_seconds: float
    code_bytes: int
    temp_bytes: int
    hits: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0

    @property
    def waste(self) -> float:
        """Part of the tokens it ran that were padding."""
        return 1 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0


class BucketTable:
    """programs: what can be compiled. policy: what happens when a program is asked for that is not compiled yet:
    "compile" makes it on the spot, counts it and says so; "next_larger" takes the next larger one that is there;
    "refuse" raises. Both of the latter raise BucketMissError when nothing fits.
    """

    def __init__(self, programs: ProgramSet, *, policy: Policy = "compile", compiler_options: dict | None = None):
        if policy not in POLICIES:
            raise ValueError(f"unknown bucket policy {policy!r}; use one of {POLICIES}")
        self.programs = programs
        self.policy = policy
        self.compiler_options = compiler_options
        self.entries: dict[Program, Entry] = {}
        self.compiled_on_demand = 0
        self.misses = 0

    def warm_up(
        self,
        programs: Iterable[Program] | None = None,
        *,
        threads: int | None = None,
        progress: bool | Report = False,
    ) -> None:
        """Compile `programs` (all by default): traced one after the other, which Python does no faster in threads,
        each handed to a pool of compiling threads as soon as it is lowered.

        progress: True shows a bar on stderr; or a function called as progress(done, total, name).
        """
        todo = [p for p in (self.programs.all() if programs is None else programs) if p not in self.entries]
        pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count())
        with reporting(progress, len(todo)) as report, pool:
            running = []
            for program in todo:
                lowered, seconds = self._lower(program)
                running.append(pool.submit(self._compile, program, lowered, seconds))
            for done, future in enumerate(concurrent.futures.as_completed(running), 1):
                entry = future.result()
                self.entries[entry.program] = entry
                report(done, len(todo), str(entry.program))

    def get(self, program: Program, *, real_tokens: int = 0) -> Entry:
        """The entry that will run `program`, or a larger one under "next_larger"; its use is recorded."""
        entry = self.entries.get(program)
        if entry is None:
            self.misses += 1
            entry = self._miss(program)
        entry.hits += 1
        entry.real_tokens += real_tokens
        entry.padded_tokens += entry.program.num_tokens if real_tokens else 0
        return entry

    def call(self, entry: Entry, *args: Any) -> Any:
        """Run an executable. A mismatch of its arguments names the leaf, the bucket and the way out.

        With `jax_debug_nans` on a NaN in its results runs the program again, one operation after the other, and raises
        FloatingPointError from the one that made it; the state is not donated then and stays what it was.
        """
        try:
            return entry.compiled(*args)
        except (TypeError, ValueError) as error:
            raise BucketMissError(
                f"{entry.program} was compiled for other arguments: {error}\n"
                "Every leaf must keep the shape, dtype and sharding it had at start-up; weights are replaced with "
                "arrays of the same kind, a state of another size needs a runner of its own."
            ) from error
        except Exception as error:
            if type(error).__name__ != "InternalFloatingPointError":  # JAX's own, which only its jit turns into text
                raise
            self._find_nan(entry, args)

    def _find_nan(self, entry: Entry, args: tuple[Any, ...]) -> NoReturn:
        run, _ = self.programs.function(entry.program)
        args = jax.tree.map(lambda a: jax.device_put(a) if isinstance(a, np.ndarray) else a, args)
        with jax.disable_jit():
            run(*args)
        raise FloatingPointError(f"{entry.program} gave NaN or infinity, which none of its operations did alone")

    def stats(self) -> list[dict[str, Any]]:
        """One row per executable, in the order of the ladder."""
        order = {program: i for i, program in enumerate(self.programs.all())}
        return [
            {
                "executable": str(e.program),
                "lower_s": e.lower_seconds,
                "compile_s": e.compile_seconds,
                "code_bytes": e.code_bytes,
                "temp_bytes": e.temp_bytes,
                "hits": e.hits,
                "real_tokens": e.real_tokens,
                "padded_tokens": e.padded_tokens,
                "waste": e.waste,
            }
            for e in sorted(self.entries.values(), key=lambda e: order.get(e.program, len(order)))
        ]

    def __str__(self) -> str:
        head = f"{'executable':<28}{'lower s':>8}{'compile s':>10}{'code MB':>9}{'temp MB':>9}{'hits':>7}{'waste':>7}"
        lines = [
            f"{r['executable']:<28}{r['lower_s']:>8.2f}{r['compile_s']:>10.2f}{r['code_bytes'] / 1e6:>9.2f}"
            f"{r['temp_bytes'] / 1e6:>9.2f}{r['hits']:>7}{r['waste']:>7.0%}"
            for r in self.stats()
        ]
        tail = f"{len(lines)} executables, {self.misses} misses, {self.compiled_on_demand} compiled on demand"
        if attend := custom(self.programs.implementation):
            tail += f"; attention by {name_of(attend)}"
        return "\n".join([head, *lines, tail])

    def _miss(self, program: Program) -> Entry:
        if self.policy == "compile":
            started = time.perf_counter()
            entry = self._compile(program, *self._lower(program))
            self.entries[program] = entry
            self.compiled_on_demand += 1
            logger.info("compiled %s on demand in %.1f s", program, time.perf_counter() - started)
            return entry
        if self.policy == "next_larger":
            for larger in self.programs.larger(program):
                if larger in self.entries:
                    return self.entries[larger]
        ready = ", ".join(str(p) for p in self.entries) or "nothing"
        raise BucketMissError(
            f"{program} is not compiled (policy {self.policy!r}; compiled: {ready}). Add it to the ladder and call "
            "warm_up, or use policy='compile'."
        )

    def _lower(self, program: Program) -> tuple[Any, float]:
        started = time.perf_counter()
        lowered = self.programs.lower(program)
        return lowered, time.perf_counter() - started

    def _compile(self, program: Program, lowered: Any, lower_seconds: float) -> Entry:
        started = time.perf_counter()
        options = options_for(program.num_tokens or program.size) | (self.compiler_options or {})
        compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - started
        return_freed_memory()
        code, temp = _memory(compiled)
        return Entry(program, compiled, lower_seconds, seconds, code, temp)


def _memory(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """(bytes of code, bytes of temporaries), 0 where the backend does not say."""
    analysis = compiled.memory_analysis()
    return (
        int(getattr(analysis, "generated_code_size_in_bytes", 0) or 0),
        int(getattr(analysis, "temp_size_in_bytes", 0) or 0),
    )
