"""`StepRecorder`: the sizes of the steps that a runner is given, as a file that the ladder tools read."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxrunner.ladder.steps import COLUMNS, Steps


class Runner(Protocol):
    """What is recorded: anything with the contract's `execute_model`."""

    def execute_model(self, scheduler_output: Any, /) -> Any: ...


class StepRecorder:
    """Records every step that `runner` is given, until `close` or the end of a `with`, without changing what it does.

    path: CSV file, written by `close`; None keeps the steps in memory alone. `steps` are those so far. A plan that the
    runner refuses is not a step, nor is one without tokens. For a whole recording that can be replayed bit by bit see
    `jaxrunner.FlightRecorder`.
    """

    def __init__(self, runner: Runner, path: str | Path | None = None):
        self._runner, self._path = runner, path
        self._rows: list[tuple[float, ...]] = []
        self._begin = time.perf_counter()
        self._execute = runner.execute_model
        self._open = True
        runner.execute_model = self._call  # type: ignore[method-assign]

    def __enter__(self) -> StepRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def steps(self) -> Steps:
        return Steps(*np.array(self._rows, np.float64).reshape(-1, len(COLUMNS)).T)

    def close(self) -> None:
        """Stop recording and write the file."""
        if self._open:
            del self._runner.execute_model  # the method of the class is there again
            self._open = False
            if self._path is not None:
                self.steps.write(self._path)

    def _call(self, scheduler_output: Any, /) -> Any:
        started = time.perf_counter() - self._begin
        result = self._execute(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._rows.append((started, *step_sizes(scheduler_output)))
        return result


def step_sizes(scheduler_output: Any) -> tuple[int, int, int, int, int]:
    """(num_reqs, num_tokens, max_query_len, num_prefills, context_tokens) of a plan, see `Steps`.

    A request is in its prompt if it is new, has no output yet, or runs more than one token and those drafts.
    """
    scheduled = scheduler_output.num_scheduled_tokens
    counts = np.fromiter(scheduled.values(), np.int64, len(scheduled))
    cached = scheduler_output.scheduled_cached_reqs
    run = np.fromiter((scheduled.get(i, 0) for i in cached.req_ids), np.int64, len(cached.req_ids))
    if drafts := scheduler_output.scheduled_spec_decode_tokens:
        run -= np.fromiter((len(drafts.get(i, ())) for i in cached.req_ids), np.int64, len(run))
    prefills = ((np.array(cached.num_output_tokens, np.int64) == 0) | (run > 1)) & (run > 0)
    new = [r for r in scheduler_output.scheduled_new_reqs if scheduled.get(r.req_id)]
    context = int(np.array(cached.num_computed_tokens, np.int64)[run > 0].sum())
    context += sum(r.num_computed_tokens for r in new)
    live = counts[counts > 0]
    return len(live), int(live.sum()), int(live.max()), len(new) + int(prefills.sum()), context + int(live.sum())
