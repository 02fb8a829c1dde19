"""`StepTimer`: host, dispatch and device time of every step of a runner, in a ring."""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import Any

import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.contract import ModelRunnerOutput, SchedulerOutput
from jaxrunner.selection.registry import Runner
from jaxrunner.timing.ranges import RANGES
from jaxrunner.timing.times import StepTimes

_COLUMN = {name: i for i, name in enumerate(RANGES)}
_NO_RANGE = -1


class _Step:
    """One step while it runs, in ns; per range: when it first began, when it last ended, its time without the ranges
    in it. open: the innermost open range."""

    __slots__ = ("begin", "end", "num_reqs", "num_tokens", "open", "program", "ready", "spent")

    def __init__(self, num_reqs: int, num_tokens: int):
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.begin, self.end, self.spent = [0] * len(RANGES), [0] * len(RANGES), [0] * len(RANGES)
        self.open, self.program, self.ready = _NO_RANGE, None, False


class _Range:
    """A range of a step: JAX's annotation, and its times."""

    __slots__ = ("_annotation", "_began", "_column", "_outer", "_step", "_timer")

    def __init__(self, timer: StepTimer, step: _Step, name: str, /, **metadata: Any):
        self._timer, self._step, self._column = timer, step, _COLUMN[name]
        self._annotation = TraceAnnotation(name, **metadata)
        if metadata:
            step.program = metadata.get("program", step.program)
            step.ready = metadata.get("ready", step.ready)

    def __enter__(self) -> None:
        step = self._step
        self._outer, step.open = step.open, self._column
        self._annotation.__enter__()
        self._began = perf_counter_ns()
        if not step.begin[self._column]:
            step.begin[self._column] = self._began

    def __exit__(self, *error: object) -> None:
        now, step, column = perf_counter_ns(), self._step, self._column
        self._annotation.__exit__(*error)
        step.end[column] = now
        step.spent[column] += now - self._began
        step.open = self._outer
        if self._outer != _NO_RANGE:
            step.spent[self._outer] -= now - self._began
        elif column == len(RANGES) - 1 and error[0] is None:
            self._timer._store(step)


class StepTimer:
    """Times every step of `runner` until `close` or the end of a `with`, without changing what it does.

    capacity: steps that are kept, the newest ones. `times` are those whose tokens have arrived. Without a timer a step
    costs nothing; with one, a few microseconds, whatever the number of requests. A runner has one timer at a time
    (RuntimeError for another); of several recorders the one that was opened last is closed first.
    """

    def __init__(self, runner: Runner, *, capacity: int = 4096):
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1")
        self._execute, self._annotate = runner.execute_model, runner.annotate
        if isinstance(self._annotate, functools.partial) and self._annotate.func is _Range:
            raise RuntimeError("this runner has a StepTimer already; close that one first")
        self._runner, self._capacity = runner, capacity
        self._steps: list[_Step] = [_Step(0, 0)] * capacity
        self._count = 0
        self._open = True
        self._wrapped = vars(runner).get("execute_model")  # another recorder's
        runner.execute_model = self._call  # type: ignore[method-assign, assignment]
        runner.annotate = functools.partial(_Range, self, _Step(0, 0))

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def times(self) -> StepTimes:
        """The steps so far, oldest first; a copy."""
        first = max(self._count - self._capacity, 0)
        numbers = np.arange(first, self._count)
        steps = [self._steps[place] for place in numbers % self._capacity]

        def column(name: str, *shape: int) -> np.ndarray:
            return np.array([getattr(step, name) for step in steps], np.int64).reshape(len(steps), *shape)

        return StepTimes(
            number=numbers,
            num_reqs=column("num_reqs"),
            num_tokens=column("num_tokens"),
            program=tuple(str(step.program) for step in steps),
            begin=column("begin", len(RANGES)),
            end=column("end", len(RANGES)),
            spent=column("spent", len(RANGES)),
            ready=column("ready").astype(bool),
        )

    def close(self) -> None:
        """Stop; steps in flight are not recorded any more."""
        if self._open:
            del self._runner.execute_model  # the method of the class is there again
            if self._wrapped is not None:
                self._runner.execute_model = self._wrapped  # type: ignore[method-assign]
            self._runner.annotate = self._annotate
            self._open = False

    def _call(self, scheduler_output: SchedulerOutput, /) -> ModelRunnerOutput | None:
        step = _Step(len(scheduler_output.num_scheduled_tokens), scheduler_output.total_num_scheduled_tokens)
        self._runner.annotate = functools.partial(_Range, self, step)
        return self._execute(scheduler_output)

    def _store(self, step: _Step) -> None:
        if self._open:
            self._steps[self._count % self._capacity] = step
            self._count += 1
