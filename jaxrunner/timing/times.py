"""`StepTimes`: the times of steps as columns, as a table and as a trace."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrunner.timing.ranges import RANGES

if TYPE_CHECKING:
    from rich.table import Table

HOST = ("preprocess", "inputs", "bookkeeping", "postprocess")
DISPATCH = ("admit", "forward", "sample")
PROCESS, HOST_THREAD, DEVICE_THREAD = 1, 1, 2


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """N steps in their order. number, num_reqs, num_tokens: i64[N]. program: the executable of each forward pass.

    begin, end, spent: i64[N, len(RANGES)], in ns of `time.perf_counter_ns`, 0 for a range that a step does not have:
    when the range first began and last ended, and its time without the ranges in it. ready: bool[N], the device had
    finished when the host asked for the tokens.
    """

    number: np.ndarray
    num_reqs: np.ndarray
    num_tokens: np.ndarray
    program: tuple[str, ...]
    begin: np.ndarray
    end: np.ndarray
    spent: np.ndarray
    ready: np.ndarray

    def __len__(self) -> int:
        return len(self.number)

    def us(self, *ranges: str) -> np.ndarray:
        """f64[N], microseconds spent in the ranges."""
        return self.spent[:, [RANGES.index(name) for name in ranges]].sum(axis=1) / 1e3

    @property
    def host_us(self) -> np.ndarray:
        """f64[N], the host's own work: before the launch, and on the tokens; without making executables."""
        return self.us(*HOST)

    @property
    def dispatch_us(self) -> np.ndarray:
        """f64[N], calling executables, until the calls return."""
        return self.us(*DISPATCH)

    @property
    def device_us(self) -> np.ndarray:
        """f64[N], from the launch of the forward pass, or the end of the step before if that was later, until the
        tokens are on the host. Where `ready`, the device had finished at an unknown time before: an upper bound.
        """
        begin, end = self.device_ns()
        return (end - begin) / 1e3

    def device_ns(self) -> tuple[np.ndarray, np.ndarray]:
        """(begin, end) of each step on the device, i64[N]; see `device_us`."""
        launch, end = self.begin[:, RANGES.index("forward")], self.end[:, RANGES.index("wait")]
        previous = np.concatenate([launch[:1], end[:-1]])
        return np.maximum(launch, previous), end

    def table(self) -> Table:
        """Medians for each executable, in microseconds, and over all steps."""
        from rich.table import Table

        table = Table(title="median microseconds of a step")
        for heading in ("executable", "steps", "tokens", *HOST, *DISPATCH, "host", "dispatch", "wait", "device"):
            table.add_column(heading, justify="left" if heading == "executable" else "right")
        programs = np.array(self.program)
        for program in dict.fromkeys(self.program):
            table.add_row(program, *self._medians(programs == program))
        if len(self):
            table.add_section()
            table.add_row("all", *self._medians(np.ones(len(self), bool)))
        return table

    def _medians(self, chosen: np.ndarray) -> list[str]:
        columns = [self.us(name) for name in (*HOST, *DISPATCH)]
        columns += [self.host_us, self.dispatch_us, self.us("wait"), self.device_us]
        bound = "<=" if self.ready[chosen].mean() > 0.5 else ""
        shown = [f"{np.median(column[chosen]):.0f}" for column in columns]
        shown[-1] = bound + shown[-1]
        return [str(int(chosen.sum())), str(int(self.num_tokens[chosen].sum())), *shown]

    def trace(self) -> dict[str, Any]:
        """The steps as events of the Chrome trace format, for Perfetto: a track of the host, one of the device."""
        events: list[dict[str, Any]] = [_named("process_name", HOST_THREAD, "jaxrunner")]
        events += [_named("thread_name", HOST_THREAD, "host"), _named("thread_name", DEVICE_THREAD, "device")]
        origin = self.begin[self.begin > 0].min() if len(self) else 0
        device = zip(*self.device_ns(), strict=True)
        for i, (begun, done) in enumerate(device):
            arguments = {
                "step": int(self.number[i]),
                "executable": self.program[i],
                "requests": int(self.num_reqs[i]),
                "tokens": int(self.num_tokens[i]),
            }
            for column in np.flatnonzero(self.begin[i]):
                span = self.begin[i, column], self.end[i, column]
                events.append(_event(RANGES[column], HOST_THREAD, origin, *span, arguments))
            bound = {"upper_bound": bool(self.ready[i])}
            events.append(_event(self.program[i], DEVICE_THREAD, origin, begun, done, arguments | bound))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_trace(self, path: str | Path) -> None:
        """Write `trace` as a JSON file, which https://ui.perfetto.dev and chrome://tracing open."""
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")


def _event(name: str, thread: int, origin: int, begin: int, end: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A complete event; times in microseconds."""
    times = {"ts": float(begin - origin) / 1e3, "dur": float(end - begin) / 1e3}
    return {"ph": "X", "name": name, "pid": PROCESS, "tid": thread, **times, "args": arguments}


def _named(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PROCESS, "tid": thread, "args": {"name": name}}
