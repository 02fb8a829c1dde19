"""Many executables at once: loaded, or lowered and compiled, on all cores, now or in the background.

Loading and compiling are XLA's work and are done by a pool of threads. Lowering is Python's and gains nothing from
threads: it is done one program after the other, and where it is what a start waits for, by some processes as well.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxrunner.compile.compiler import Compiler, LoweredProgram
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.lowering_process import LoweringProcess, LoweringProcessError, default_processes
from jaxrunner.compile.programs import Program
from jaxrunner.compile.progress import Report

logger = logging.getLogger("jaxrunner")


class WarmUp:
    """programs: in the order in which they are wanted. head: those that a first token needs. then: those that the
    second needs as well; they are lowered meanwhile and compiled after the head, because two compilations that generate
    code for a GPU wait for each other. Nothing else is begun before all these are there, unless somebody waits for it:
    with all cores at work each would take several times as long. entries: where each executable is put as soon as it is
    there.
    threads: that compile, one a core by default. processes: that lower beside this one, see `default_processes`.

    `run` does it all and raises the first error. `start` does it in a thread of its own; `wait_for` then moves a
    program to the front. The first error ends a warm-up: it is in `error`, and whoever waits gets it.
    """

    def __init__(
        self,
        compiler: Compiler,
        programs: Iterable[Program],
        entries: dict[Program, Entry],
        *,
        head: Iterable[Program] = (),
        then: Iterable[Program] = (),
        threads: int | None = None,
        processes: int | None = None,
        report: Report = lambda done, total, name: None,
    ):
        self._processes = processes
        self._compiler = compiler
        self._entries = entries
        self._threads = threads or os.cpu_count() or 1
        self._report = report
        self._futures: dict[Program, Future[Entry]] = {program: Future() for program in programs}
        self._head = [program for program in head if program in self._futures]
        self._then = [program for program in then if program in self._futures]
        self._held: list[LoweredProgram] = []
        self._to_lower: list[Program] = []
        self._begun: set[Program] = set()
        self._urgent: list[Program] = []
        self._num_loading = 0
        self._num_compiling = 0
        self._num_helped = 0
        self._num_done = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def __contains__(self, program: Program) -> bool:
        return program in self._futures

    @property
    def num_left(self) -> int:
        return len(self._futures) - self._num_done

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Make them all. Raises the first error, after the programs in work have come to an end."""
        self._run()
        if self.error is not None:
            raise self.error

    def start(self) -> None:
        """Make them all in a thread, which an ending interpreter does not wait for longer than for what is in work."""
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="jaxrunner-warm-up")
        self._thread.start()

    def join(self) -> None:
        """Wait until a started warm-up has ended. Raises its error."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def wait_for(self, program: Program, *others: Program) -> Entry:
        """Wait for whichever of these is there first. If none of them is in work yet, `program` is what is made next.
        Raises the error that ended the warm-up."""
        wanted = [p for p in (program, *others) if p in self._futures]
        with self._changed:
            if not self._begun.intersection(wanted):
                self._urgent.append(program)
                self._changed.notify_all()
        done, _ = concurrent.futures.wait([self._futures[p] for p in wanted], return_when="FIRST_COMPLETED")
        return next(self._futures[p] for p in wanted if self._futures[p] in done).result()

    def _run(self) -> None:
        started = time.perf_counter()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="jaxrunner-compile") as pool:
            helpers: list[threading.Thread] = []
            try:
                cached = [program for program in self._futures if self._compiler.cached(program)]
                self._num_loading = len(cached)
                self._begun.update(cached)
                self._to_lower.extend(program for program in self._futures if program not in self._begun)
                for program in cached:
                    pool.submit(self._attempt, self._load, program)
                helpers = self._start_helpers(pool)
                while (following := self._next()) is not None:
                    self._attempt(self._lower, following, pool)
            except BaseException as error:
                self._fail(error)
            for helper in helpers:
                helper.join()
        self._compiler.trim_cache()
        if self.error is None and self._num_done < len(self._futures):
            self._fail(RuntimeError("the warm-up ended with the interpreter"))
        if self._thread is not None and self.error is None:
            seconds = time.perf_counter() - started
            logger.info("all %d executables are ready after %.1f s", len(self._futures), seconds)

    def _next(self, *, helps: bool = False) -> Program | None:
        """The next program to lower. Waits while loads may still fail and add one, and while enough programs wait for a
        thread that compiles: one that somebody waits for is not to stand in a long line."""
        with self._changed:
            self._changed.wait_for(lambda: self.error or self._candidate(helps) or not self._may_come)
            program = self._candidate(helps)
            if self.error is not None or program is None or not threading.main_thread().is_alive():
                return None
            self._num_compiling += 1
            self._num_helped += helps
            self._to_lower.remove(program)
            self._begun.add(program)
            return program

    def _candidate(self, helps: bool) -> Program | None:
        """What may be lowered now. A process that helps begins after the first ones: they would wait for it."""
        missing = [program for program in (*self._head, *self._then) if not self._futures[program].done()]
        if self._num_compiling > self._threads or (helps and missing):
            return None
        wanted = (*self._urgent, *(missing or self._to_lower))
        return next((program for program in wanted if program in self._to_lower), None)

    @property
    def _head_is_missing(self) -> bool:
        return not all(self._futures[program].done() for program in self._head)

    @property
    def _may_come(self) -> bool:
        """Whether there is, or can still be, something to lower."""
        return bool(self._to_lower or self._num_loading or self._num_helped)

    def _start_helpers(self, pool: concurrent.futures.Executor) -> list[threading.Thread]:
        """Threads that have a process lower for them, each with its own."""
        count = self._processes
        if count is None:
            count = default_processes(self._compiler.programs, len(self._to_lower))
        helpers = [threading.Thread(target=self._attempt, args=(self._help, pool)) for _ in range(count)]
        for helper in helpers:
            helper.start()
        return helpers

    def _help(self, pool: concurrent.futures.Executor) -> None:
        process = LoweringProcess(self._compiler.programs)
        try:
            while (program := self._next(helps=True)) is not None:
                lowered = None
                try:
                    lowered = process.lower(program)
                finally:
                    with self._changed:
                        self._num_helped -= 1
                        if lowered is None:  # this process's own turn; if that fails too, it says why
                            self._num_compiling -= 1
                            self._to_lower.append(program)
                        self._changed.notify_all()
                pool.submit(self._attempt, self._compile, lowered)
        except LoweringProcessError as error:
            logger.info("a program could not be lowered in a process of its own: %s", error)
        finally:
            process.close()

    def _attempt(self, work, *args) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._fail(error)

    def _load(self, program: Program) -> None:
        entry = None
        try:
            entry = self._compiler.load(program)
        finally:
            with self._changed:
                self._num_loading -= 1
                if entry is None:
                    self._to_lower.append(program)
                self._changed.notify_all()
        if entry is not None:
            self._ready(entry)

    def _lower(self, program: Program, pool: concurrent.futures.Executor) -> None:
        pool.submit(self._attempt, self._compile, self._compiler.lower(program))

    def _compile(self, lowered: LoweredProgram) -> None:
        with self._changed:
            if lowered.program in self._then and self._head_is_missing:
                self._held.append(lowered)
                return
        if self.error is None:
            entry = self._compiler.compile(lowered)
            with self._changed:
                self._num_compiling -= 1
            self._ready(entry)

    def _ready(self, entry: Entry) -> None:
        with self._changed:
            self._entries[entry.program] = entry
            if self.error is None:
                self._futures[entry.program].set_result(entry)
                self._num_done += 1
                self._report(self._num_done, len(self._futures), str(entry.program))
            self._changed.notify_all()
            held, self._held = self._held, []
        for lowered in held:
            self._compile(lowered)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.error is None:
                self.error = error
                if self._thread is not None and threading.main_thread().is_alive():
                    logger.error("compiling in the background has failed: %s", error)
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(self.error)
            self._to_lower.clear()
            self._changed.notify_all()
