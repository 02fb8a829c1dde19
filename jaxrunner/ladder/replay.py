"""Replaying steps through ladders: what each of them pads, misses and costs, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.compile.ladder import Ladder
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import MEASURED, PEER, Costs
from jaxrunner.ladder.placement import WAYS, Scheme, as_scheme, place_all
from jaxrunner.ladder.serving import Limits, steps_of
from jaxrunner.ladder.steps import Steps
from jaxrunner.ladder.tables import table
from jaxrunner.ladder.traces import Trace


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One ladder over some steps.

    buckets, executables: see `StartUp`. steps, real_tokens, padded_tokens: what ran, pads included in the last.
    ways: steps by how they ran, see `placement.WAYS`. misses: distinct sizes that were compiled on demand.
    cost, cost_without_padding: of all steps, in `unit`; the second is what the same steps cost in buckets of their very
    sizes. start_s, start_bytes: see `Costs.start_up`.
    """

    name: str
    buckets: int
    executables: int
    steps: int
    real_tokens: int
    padded_tokens: int
    ways: Mapping[str, int]
    misses: int
    cost: float
    cost_without_padding: float
    unit: str
    start_s: float | None
    start_bytes: float | None

    @property
    def waste(self) -> float:
        """Part of the tokens that ran that were padding."""
        return 1 - self.real_tokens / self.padded_tokens

    @property
    def overhead(self) -> float:
        """What padding adds to the cost, as a part of the cost without it."""
        return self.cost / self.cost_without_padding - 1

    @property
    def lower_bound(self) -> bool:
        """Whether eager steps are among those priced: as if they were replayed, which no eager step is faster than."""
        return self.ways["eager"] > 0

    @property
    def mean_step(self) -> float:
        return self.cost / self.steps

    def row(self) -> dict[str, Any]:
        """For a table or JSON."""
        seconds = self.unit == "s"
        return {
            "ladder": self.name,
            "buckets": self.buckets,
            "executables": self.executables,
            "steps": self.steps,
            "real_tokens": self.real_tokens,
            "padded_tokens": self.padded_tokens,
            "waste": self.waste,
            "misses": self.misses,
            "eager_steps": self.ways["eager"],
            "step_ms": self.mean_step * 1e3 if seconds else None,
            "padding_cost": self.overhead,
            "start_s": self.start_s,
            "start_bytes": self.start_bytes,
        }


def replay(steps: Steps, scheme: Scheme | Ladder, costs: Costs) -> Outcome:
    """The outcome of one ladder. Raises AdmissionError for no steps at all."""
    if not len(steps):
        raise AdmissionError("there are no steps to replay")
    scheme = as_scheme(scheme)
    placed = place_all(scheme, steps)
    start_s, start_bytes = costs.start_up(scheme)
    made = scheme.start_up()
    missed = placed.way == WAYS.index("miss")
    return Outcome(
        name=scheme.name,
        buckets=made.buckets,
        executables=made.executables,
        steps=len(steps),
        real_tokens=int(steps.num_tokens.sum()),
        padded_tokens=int(placed.size.sum()),
        ways={way: placed.count(way) for way in WAYS},
        misses=len(np.unique(np.stack([placed.kind[missed], placed.size[missed]]), axis=1).T),
        cost=float(costs.of_placements(placed, steps).sum()),
        cost_without_padding=float(costs.without_padding(placed, steps).sum()),
        unit=costs.unit,
        start_s=start_s,
        start_bytes=start_bytes,
    )


COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ladder", "ladder", "s"),
    ("buckets", "buckets", "d"),
    ("executables", "programs", "d"),
    ("waste", "padding", ".1%"),
    ("misses", "misses", "d"),
    ("eager_steps", "eager", "d"),
    ("step_ms", "ms/step", ".3f"),
    ("padding_cost", "of it padding", ".2%"),
    ("start_s", "start s", ".0f"),
    ("start_bytes", "start GiB", "GiB"),
)
"""(key of `Outcome.row`, heading, format)."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Outcomes of several ladders. title: what was replayed."""

    title: str
    outcomes: tuple[Outcome, ...]

    def __getitem__(self, name: str) -> Outcome:
        return next(o for o in self.outcomes if o.name == name)

    def rows(self) -> list[dict[str, Any]]:
        return [outcome.row() for outcome in self.outcomes]

    def table(self) -> str:
        """As text, one line a ladder."""
        return table(self.rows(), COLUMNS)

    def plot(self) -> Any:
        """A bar for each ladder; a matplotlib figure (extra `plots`)."""
        from jaxrunner.ladder import pictures

        return pictures.comparison(self)


def compare(
    source: Trace | Steps,
    ladders: Sequence[Scheme | Ladder],
    costs: Costs | None = None,
    *,
    graph_costs: Costs | None = None,
    limits: Limits | None = None,
    closed_loop: bool = False,
) -> Comparison:
    """Replay one load through every ladder.

    source: a trace is first served in a simulation, with the first ladder; recorded steps are taken as they are.
    closed_loop: serve the trace once with each ladder, so that lost time shows in later batches; else all ladders see
    the same steps. costs: of compiled ladders, this package's on an H200 if left out. graph_costs: of captured ones,
    vLLM's on an H200 if left out, or `costs` where those are not in seconds.
    """
    costs, limits = costs or Costs.load(MEASURED), limits or Limits()
    graph_costs = graph_costs or (Costs.load(PEER) if costs.unit == "s" else costs)
    schemes = [as_scheme(ladder, f"ladder {i}") for i, ladder in enumerate(ladders, 1)]
    if not schemes:
        raise AdmissionError("give at least one ladder to compare")
    if closed_loop and isinstance(source, Steps):
        raise AdmissionError("recorded steps are fixed; a closed loop needs a trace of requests")
    name = source.name if isinstance(source, Trace) else "recorded steps"
    priced = [(scheme, graph_costs if scheme.made == "captured" else costs) for scheme in schemes]
    if closed_loop:
        return Comparison(name, tuple(replay(steps_of(source, s, c, limits), s, c) for s, c in priced))
    steps = steps_of(source, *priced[0], limits)
    return Comparison(name, tuple(replay(steps, s, c) for s, c in priced))
