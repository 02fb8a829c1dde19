"""Serving a request trace in a simulation: which steps an engine would have run, and when.

The scheduling is that of `jaxrunner.engine.scheduler.Scheduler`: running requests before waiting ones, decodes before
chunks of prompts, both within the token budget. The clock is advanced by the measured time of the bucket that each step
runs in, so a ladder that wastes time meets longer queues and larger batches (a closed loop). Not modelled: the size of
the KV cache (nobody is preempted), prefix caching, and host time beyond what the measured steps contain.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.placement import Scheme
from jaxrunner.ladder.steps import COLUMNS, Steps
from jaxrunner.ladder.traces import Trace

MAX_STEPS = 2_000_000


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes of the simulated engine, see `RunnerConfig`."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = 16384

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 2 or self.max_num_batched_tokens < self.max_num_seqs:
            raise AdmissionError(
                f"max_num_seqs {self.max_num_seqs} must be at least 1, max_model_len {self.max_model_len} at least 2, "
                f"and max_num_batched_tokens {self.max_num_batched_tokens} at least max_num_seqs"
            )


@dataclasses.dataclass(frozen=True)
class Served:
    """steps: what ran. step_s: f64[S], seconds of each. first_token_s, finished_s: f64[R], seconds after the arrival of
    each request, NaN where the simulation ended before."""

    steps: Steps
    step_s: np.ndarray
    first_token_s: np.ndarray
    finished_s: np.ndarray


def serve(trace: Trace, scheme: Scheme, costs: Costs, limits: Limits, *, drain: bool = True) -> Served:
    """Serve a trace. costs must be in seconds; requests longer than max_model_len are cut.

    drain: go on after the last arrival until everybody is finished. Without it the steps are those under load alone: an
    engine that nobody asks any more runs ever smaller batches, which say nothing about the load.
    """
    if costs.unit != "s":
        raise AdmissionError(f"a simulation needs step times, {costs.name!r} counts {costs.unit}")
    trace = trace.limited(max_model_len=limits.max_model_len)
    engine = _Engine(trace, limits)
    seconds = _StepSeconds(scheme, costs)
    clock, rows, times = 0.0, [], []
    while engine.unfinished and (drain or clock <= trace.arrival_s[-1]):
        if (sizes := engine.plan(clock)) is None:
            clock = engine.next_arrival
            continue
        rows.append((clock, *sizes))
        times.append(seconds(sizes))
        clock += times[-1]
        engine.finish_step(clock)
        if len(rows) > MAX_STEPS:
            raise AdmissionError(f"{trace.name!r} takes more than {MAX_STEPS} steps; serve a part of it (Trace.first)")
    steps = Steps(*np.array(rows, np.float64).reshape(-1, len(COLUMNS)).T)
    return Served(steps, np.array(times), engine.first_token - trace.arrival_s, engine.finished - trace.arrival_s)


class _StepSeconds:
    """Seconds of a step by its sizes; each combination is placed once."""

    def __init__(self, scheme: Scheme, costs: Costs):
        self._scheme, self._costs = scheme, costs
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, sizes: tuple[int, ...]) -> float:
        *key, context = sizes
        base = self._known.get(tuple(key))
        if base is None:
            _, kind, size = self._scheme.place(*key)
            base = self._known[tuple(key)] = float(self._costs.bucket(kind, size))
        return base + self._costs.per_key * context


class _Engine:
    """The requests of a trace: waiting (in order of arrival), running (the same order), finished."""

    def __init__(self, trace: Trace, limits: Limits):
        self.limits = limits
        self.arrival, self.prompt = trace.arrival_s, trace.prompt_tokens
        self.last = trace.prompt_tokens + trace.output_tokens - 1  # the last sampled token is not run
        self.computed = np.zeros(len(trace), np.int64)
        self.first_token = np.full(len(trace), np.nan)
        self.finished = np.full(len(trace), np.nan)
        self.running = np.zeros(0, np.int64)
        self.counts = np.zeros(0, np.int64)
        self.waiting = 0  # requests from here on have not begun

    @property
    def unfinished(self) -> bool:
        return self.waiting < len(self.arrival) or len(self.running) > 0

    @property
    def next_arrival(self) -> float:
        return float(self.arrival[self.waiting])

    def plan(self, clock: float) -> tuple[int, int, int, int, int] | None:
        """(num_reqs, num_tokens, max_query_len, num_prefills, context_tokens) of a step, None if nobody is there."""
        known = np.maximum(self.prompt[self.running], self.computed[self.running] + 1)
        counts = _within(known - self.computed[self.running], self.limits.max_num_batched_tokens)
        budget = self.limits.max_num_batched_tokens - int(counts.sum())
        new: list[int] = []
        while (
            budget > 0
            and len(self.running) + len(new) < self.limits.max_num_seqs
            and self.waiting < len(self.arrival)
            and self.next_arrival <= clock
        ):
            new.append(min(int(self.prompt[self.waiting]), budget))
            budget -= new[-1]
            self.waiting += 1
        if new:
            self.running = np.concatenate([self.running, np.arange(self.waiting - len(new), self.waiting)])
            counts = np.concatenate([counts, new])
        self.counts = counts
        if not len(counts):
            return None
        ran = counts > 0
        rows, counts = self.running[ran], counts[ran]
        prefills = int((self.computed[rows] < self.prompt[rows]).sum())
        context = int(self.computed[rows].sum() + counts.sum())
        return len(rows), int(counts.sum()), int(counts.max()), prefills, context

    def finish_step(self, clock: float) -> None:
        rows = self.running
        before = self.computed[rows]
        self.computed[rows] = after = before + self.counts
        prompt = self.prompt[rows]
        self.first_token[rows[(before < prompt) & (after >= prompt)]] = clock
        done = after >= self.last[rows]
        if done.any():
            self.finished[rows[done]] = clock
            self.running = rows[~done]


def _within(counts: np.ndarray, budget: int) -> np.ndarray:
    """`counts` cut to the budget, chunks of prompts after decodes, each in order."""
    if counts.sum() <= budget:
        return counts
    order = np.argsort(counts > 1, kind="stable")
    ordered = counts[order]
    result = np.empty_like(counts)
    result[order] = np.clip(budget - (np.cumsum(ordered) - ordered), 0, ordered)
    return result


def steps_of(source: Trace | Steps, scheme: Scheme, costs: Costs, limits: Limits) -> Steps:
    """The steps of a trace while requests arrive, served by `scheme`; recorded steps as they are."""
    return source if isinstance(source, Steps) else serve(source, scheme, costs, limits, drain=False).steps
