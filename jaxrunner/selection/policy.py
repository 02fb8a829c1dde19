"""`Policy`: rules in their order, each of which decides for a runner or passes on; and what walking them gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxrunner.selection.facts import Facts, RunnerName


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a rule says. runner: None passes on to the next rule. forced: a closed gate raises.
    warned: vLLM says that it falls back. It announces V2, so that its silence means V1."""

    why: str
    runner: RunnerName | None = None
    forced: bool = False
    warned: bool = False


Rule = Callable[[Facts], Answer]
"""Its docstring is the question."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """labels: what the policy calls its runners. rules: in order; the last one always decides.

    Per runner. gates: what it cannot do of what is asked; a forced runner with a closed gate raises. checks: what
    raises after the choice, whether it was forced or not. ignored: fields that it accepts and does not read, and what
    happens instead.
    """

    name: str
    labels: Mapping[RunnerName, str]
    rules: tuple[Rule, ...]
    gates: Mapping[RunnerName, Callable[[Facts], list[str]]]
    checks: Mapping[RunnerName, Callable[[Facts], list[str]]]
    ignored: Mapping[RunnerName, Mapping[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Visit:
    """A rule that was asked, and its answer."""

    question: str
    answer: Answer


@dataclasses.dataclass(frozen=True)
class Decision:
    """policy: walked. visits: the rules that were asked, in order; the last one decided. errors: why the chosen runner
    cannot be built as configured, empty if it can."""

    policy: Policy
    visits: tuple[Visit, ...]
    errors: tuple[str, ...]

    @property
    def answer(self) -> Answer:
        return self.visits[-1].answer

    @property
    def runner(self) -> RunnerName:
        assert self.answer.runner is not None
        return self.answer.runner

    @property
    def label(self) -> str:
        return self.policy.labels[self.runner]


def decide(policy: Policy, facts: Facts) -> Decision:
    """Ask the rules of a policy one after the other until one decides."""
    visits = []
    for rule in policy.rules:
        answer = rule(facts)
        visits.append(Visit(" ".join((rule.__doc__ or "").split()), answer))
        if answer.runner is not None:
            gates, checks = policy.gates.get(answer.runner), policy.checks.get(answer.runner)
            closed = gates(facts) if gates and answer.forced else []
            label = policy.labels[answer.runner]
            errors = [f"{label} does not support {what}" for what in closed]
            return Decision(policy, tuple(visits), (*errors, *(checks(facts) if checks else ())))
    raise AssertionError(f"no rule of {policy.name} decided")


def passing(why: str) -> Answer:
    """The next rule is asked."""
    return Answer(why)
