"""A whole study of one load: ladders fitted on its first half, and all of them judged on the second."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import MEASURED, PEER, Costs
from jaxrunner.ladder.dispatch import CudaGraphs, Mode, Release
from jaxrunner.ladder.fitting import Fitted, fit_capture_sizes, fit_ladder, worthwhile
from jaxrunner.ladder.placement import Buckets, Scheme
from jaxrunner.ladder.replay import Comparison, Outcome, replay
from jaxrunner.ladder.rules import OWN, RULES, ladder_by_rule, vllm_sizes
from jaxrunner.ladder.serving import Limits, steps_of
from jaxrunner.ladder.steps import Steps
from jaxrunner.ladder.tables import table
from jaxrunner.ladder.traces import Trace

MAX_BUCKETS = 40
"""Of the frontier at least; it is what a default engine compiles at most."""

FITTED_SHOWN = (8, 16, 32)
"""Buckets of the fitted ladders that stand beside the rules."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A rule and the ladder fitted to the first half with as many buckets, both judged on the second half."""

    rule: Outcome
    fitted: Outcome

    @property
    def saved(self) -> float:
        """Part of the rule's padding cost that the fitted ladder saves; negative if it loses."""
        lost = self.rule.cost - self.rule.cost_without_padding
        return 1 - (self.fitted.cost - self.fitted.cost_without_padding) / lost if lost else 0.0


@dataclasses.dataclass(frozen=True)
class Study:
    """title: the load. first, second: its steps. schemes: the ladders that were compared, by name. comparison: all of
    them over the second half. pairs: each against a fitted one of as many buckets. fitted: the ladders of 2 buckets and
    more, and frontier: their outcomes over the second half."""

    title: str
    limits: Limits
    costs: Costs
    graph_costs: Costs
    first: Steps
    second: Steps
    schemes: tuple[Scheme, ...]
    comparison: Comparison
    pairs: tuple[Pair, ...]
    fitted: Fitted
    frontier: tuple[Outcome, ...]

    def best(self, horizon_s: float) -> Outcome:
        """The fitted ladder whose padding and start-up together cost least if the load goes on for `horizon_s`."""
        if any(o.start_s is None for o in self.frontier) or self.costs.unit != "s":
            raise AdmissionError(f"{self.costs.name!r} does not say what a bucket costs to make; measure it first")
        covered = float(self.second.start_s[-1] - self.second.start_s[0])
        starts = [o.start_s or 0.0 for o in self.frontier]
        return self.frontier[worthwhile([o.cost for o in self.frontier], starts, covered, horizon_s)]

    def pair_rows(self) -> list[dict[str, Any]]:
        """Rows for PAIR_COLUMNS."""
        return [_pair_row(pair) for pair in self.pairs]

    def pairs_table(self) -> str:
        """As text, one line a rule."""
        return table(self.pair_rows(), PAIR_COLUMNS)


PAIR_COLUMNS = (
    ("rule", "rule", "s"),
    ("buckets", "buckets", "d"),
    ("rule_cost", "padding cost", ".2%"),
    ("fitted_cost", "fitted", ".2%"),
    ("saved", "saved", ".0%"),
)


def _pair_row(pair: Pair) -> dict[str, Any]:
    return {
        "rule": pair.rule.name,
        "buckets": pair.rule.buckets,
        "rule_cost": pair.rule.overhead,
        "fitted_cost": pair.fitted.overhead,
        "saved": pair.saved,
    }


def study(
    source: Trace | Steps,
    *,
    limits: Limits | None = None,
    costs: Costs | None = None,
    graph_costs: Costs | None = None,
    mode: Mode = Mode.FULL_AND_PIECEWISE,
    release: Release = "0.33",
    capture_sizes: tuple[int, ...] | None = None,
    ladders: Sequence[Buckets] = (),
) -> Study:
    """Compare this package's default ladder, every rule of RULES, vLLM's CUDA graphs and fitted ladders on one load.

    The steps are those that the default ladder makes of the trace (or recorded ones), so that all ladders see the same.
    Compiled ladders are priced by `costs`, captured ones by `graph_costs`; see `replay.compare` for the defaults.
    capture_sizes: of the CUDA graphs, vLLM's default ones if left out. ladders: more of your own.
    """
    limits, costs = limits or Limits(), costs or Costs.load(MEASURED)
    graph_costs = graph_costs or (Costs.load(PEER) if costs.unit == "s" else costs)
    sizes = {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}
    compiled = [Buckets(rule, ladder_by_rule(rule, **sizes)) for rule in (OWN, *RULES)] + list(ladders)
    captured = CudaGraphs(
        f"vLLM {release} graphs",
        capture_sizes or vllm_sizes(limits.max_num_seqs, max_num_batched_tokens=limits.max_num_batched_tokens),
        limits.max_num_seqs,
        mode,
        release,
    )
    timed = costs if costs.unit == "s" else Costs.load(MEASURED)
    steps = steps_of(source, compiled[0], timed, limits)
    if len(steps) < 8:
        raise AdmissionError(f"{len(steps)} steps are too few to fit on one half and judge on the other")
    first, second = steps.halves()
    by_rule = [replay(second, scheme, costs) for scheme in compiled]
    fitted = fit_ladder(first, max(MAX_BUCKETS, *(o.buckets for o in by_rule)), costs, **sizes)
    frontier = tuple(
        replay(second, Buckets(f"fitted, {count}", ladder), costs) for count, ladder in enumerate(fitted.ladders, 2)
    )
    pairs = [Pair(outcome, frontier[outcome.buckets - 2]) for outcome in by_rule]
    by_graphs = replay(second, captured, graph_costs)
    if captured.graphs and (first.num_tokens <= captured.capture_sizes[-1]).any():
        pairs.append(Pair(by_graphs, replay(second, _fitted_graphs(captured, first, graph_costs), graph_costs)))
    outcomes = [*by_rule, by_graphs]
    return Study(
        title=source.name if isinstance(source, Trace) else "recorded steps",
        limits=limits,
        costs=costs,
        graph_costs=graph_costs,
        first=first,
        second=second,
        schemes=(*compiled, captured),
        comparison=Comparison("second half", (*outcomes, *(frontier[n - 2] for n in FITTED_SHOWN))),
        pairs=tuple(pairs),
        fitted=fitted,
        frontier=frontier,
    )


def _fitted_graphs(graphs: CudaGraphs, first: Steps, costs: Costs) -> CudaGraphs:
    count, largest = len(graphs.capture_sizes), graphs.capture_sizes[-1]
    fitted = fit_capture_sizes(first, count, costs, max_num_seqs=graphs.max_num_seqs, largest=largest)
    return dataclasses.replace(graphs, name=f"fitted graphs, {count}", capture_sizes=fitted)
