"""`BucketTable`: the compiled executables of one runner, what each cost to make and how often it was used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any, Generic, Literal, NoReturn, TypeVar

import jax
import numpy as np

from jaxrunner.compile.compiler import Compiler
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.executable_cache import ExecutableCache
from jaxrunner.compile.programs import FIRST_TOKEN_PROGRAMS, Program, Programs
from jaxrunner.compile.progress import Report, reporting
from jaxrunner.compile.warm_up import WarmUp
from jaxrunner.errors import BucketMissError
from jaxrunner.pallas.custom_attention import custom, name_of

Policy = Literal["compile", "next_larger", "refuse"]
POLICIES: tuple[Policy, ...] = ("compile", "next_larger", "refuse")
P = TypeVar("P", bound=Programs)
logger = logging.getLogger("jaxrunner")


class BucketTable(Generic[P]):
    """programs: what can be compiled. policy: what happens when a program is asked for that is not compiled yet:
    "compile" makes it on the spot, counts it and says so; "next_larger" takes the next larger one that is there;
    "refuse" raises. Both of the latter raise BucketMissError when nothing fits. While a warm-up in the background is
    still to make the program, the next larger one that is ready stands in for it; if there is none, it is made next,
    and whichever is there first is waited for. compiler_options: XLA options over the measured ones. cache: where
    executables are kept for the next start.
    """

    def __init__(
        self,
        programs: P,
        *,
        policy: Policy = "compile",
        compiler_options: dict | None = None,
        cache: ExecutableCache | None = None,
    ):
        if policy not in POLICIES:
            raise ValueError(f"unknown bucket policy {policy!r}; use one of {POLICIES}")
        self.programs = programs
        self.policy = policy
        self.compiler = Compiler(programs, options=compiler_options, cache=cache)
        self.entries: dict[Program, Entry] = {}
        self.compiled_on_demand = 0
        self.misses = 0
        self._background: WarmUp | None = None
        self._said = False

    def warm_up(
        self,
        programs: Iterable[Program] | None = None,
        *,
        threads: int | None = None,
        processes: int | None = None,
        progress: bool | Report = False,
        background: bool = False,
    ) -> None:
        """Make `programs` (all by default): loaded from the cache, or traced, lowered and compiled, see `WarmUp`.

        threads: that compile. processes: that trace and lower beside this one. Both by default as many as pay.
        progress: True shows a bar on stderr; or a function called as progress(done, total, name), from any thread.
        background: return at once; the largest program of each kind is made first. Settings that JAX keeps for a thread
        (`with jax.default_matmul_precision(...)`) do not reach that thread: use `jax.config.update`.
        """
        chosen = self.programs.all() if programs is None else programs
        todo = [p for p in chosen if p not in self.entries]
        running = self._background
        if running is not None and self.warming_up:
            if background:
                raise RuntimeError("a warm-up runs in the background already; wait for it with `join`")
            for program in (p for p in todo if p in running):
                running.wait_for(program)
            todo = [p for p in todo if p not in self.entries]
        if background:
            if progress is True:
                raise ValueError("a warm-up in the background shows no bar; give a function as progress")
            urgent = self.programs.by_urgency()
            order = {program: i for i, program in enumerate(urgent)}
            options: dict[str, Any] = {} if progress is False else {"report": progress}
            head = urgent[:FIRST_TOKEN_PROGRAMS]
            options |= {"threads": threads, "processes": processes, "head": head[:-1], "then": head[-1:]}
            todo.sort(key=order.__getitem__)
            self._background = WarmUp(self.compiler, todo, self.entries, **options)
            self._background.start()
        else:
            with reporting(progress, len(todo)) as bar:
                options = {"threads": threads, "processes": processes, "report": bar}
                WarmUp(self.compiler, todo, self.entries, **options).run()

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """XLA options over the measured ones, of whatever is made from now on."""
        return self.compiler.options

    @property
    def warming_up(self) -> bool:
        """Whether a warm-up runs in the background."""
        return self._background is not None and self._background.running

    def join(self) -> None:
        """Wait for a warm-up in the background. Raises what ended it."""
        background, self._background = self._background, None
        if background is not None:
            background.join()

    def check(self) -> None:
        """Raise, once, what ended a warm-up in the background."""
        if self._background is not None and self._background.error is not None:
            self.join()

    def get(self, program: Program, *, real_tokens: int = 0) -> Entry:
        """The entry that will run `program`, or a larger one under "next_larger" and while it is being made; its use is
        recorded."""
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
        return [e.row() for e in sorted(self.entries.copy().values(), key=lambda e: order.get(e.program, len(order)))]

    def __str__(self) -> str:
        head = (
            f"{'executable':<28}{'trace s':>8}{'lower s':>8}{'compile s':>10}{'load s':>8}"
            f"{'code MB':>9}{'temp MB':>9}{'hits':>7}{'waste':>7}"
        )
        lines = [
            f"{r['executable']:<28}{r['trace_s']:>8.2f}{r['lower_s']:>8.2f}{r['compile_s']:>10.2f}{r['load_s']:>8.2f}"
            f"{r['code_bytes'] / 1e6:>9.2f}{r['temp_bytes'] / 1e6:>9.2f}{r['hits']:>7}{r['waste']:>7.0%}"
            for r in self.stats()
        ]
        tail = f"{len(lines)} executables, {self.misses} misses, {self.compiled_on_demand} compiled on demand"
        if attend := custom(self.programs.implementation):
            tail += f"; attention by {name_of(attend)}"
        return "\n".join([head, *lines, tail])

    def _miss(self, program: Program) -> Entry:
        background = self._background
        if background is not None and background.running and program in background:
            return self._meanwhile(program, background)
        if self.policy == "compile":
            started = time.perf_counter()
            entry = self.entries[program] = self.compiler.make(program)
            self.compiled_on_demand += not entry.load_seconds
            did = "loaded" if entry.load_seconds else "compiled"
            logger.info("%s %s on demand in %.1f s", did, program, time.perf_counter() - started)
            return entry
        if self.policy == "next_larger" and (larger := self._larger(program)):
            return larger
        ready = ", ".join(map(str, list(self.entries))) or "nothing"
        raise BucketMissError(
            f"{program} is not compiled (policy {self.policy!r}; compiled: {ready}). Add it to the ladder and call "
            "warm_up, or use policy='compile'."
        )

    def _larger(self, program: Program) -> Entry | None:
        return next((self.entries[p] for p in self.programs.larger(program) if p in self.entries), None)

    def _meanwhile(self, program: Program, background: WarmUp) -> Entry:
        if not self._said:
            self._said = True
            logger.info(
                "serving while %d executables are still made: the next larger ones stand in for them",
                background.num_left,
            )
        return self._larger(program) or background.wait_for(program, *self.programs.larger(program))
