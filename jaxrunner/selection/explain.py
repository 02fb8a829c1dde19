"""`explain`: a decision with what reads every field that it could depend on, and fields that nothing reads refused."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from jaxrunner.errors import AdmissionError
from jaxrunner.selection import own, vllm_028, vllm_033
from jaxrunner.selection.facts import Facts, RunnerName
from jaxrunner.selection.policy import Decision, Policy, decide
from jaxrunner.selection.readers import Readers, facts_readers, option_readers
from jaxrunner.selection.registry import HOMES
from jaxrunner.selection.vllm_async import AsyncChoice, async_scheduling

POLICIES: dict[str, Policy] = {p.name: p for p in (own.POLICY, vllm_028.POLICY, vllm_033.POLICY)}
_SOURCES = {
    "jaxrunner": ("selection/own.py",),
    "vllm-0.28": ("selection/vllm_028.py", "selection/vllm_async.py"),
    "vllm-0.33": ("selection/vllm_033.py", "selection/vllm_async.py"),
}
_INTERNAL = {"override_from"}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """decision: with the rules that were asked. readers: field -> the places that read it, for all fields that mean
    something here. async_choice: vLLM's choice of async scheduling, None for this package's policy. notes: fields that
    the chosen runner does not read, though something else does."""

    decision: Decision
    readers: Readers
    async_choice: AsyncChoice | None
    notes: tuple[str, ...]


def explain(name: str, facts: Facts, options: Mapping[str, Any]) -> Explanation:
    """Walk the policy `name` over `facts`.

    options: what the user set, whether facts or options of `LLM`. Raises AdmissionError for one that nothing reads
    under this policy and the runner it chooses, with the nearest names.
    """
    if name not in POLICIES:
        raise AdmissionError(f"no policy is called {name!r}; use one of {', '.join(POLICIES)}")
    decision = decide(POLICIES[name], facts)
    readers = policy_readers(name, decision.runner)
    ignored = decision.policy.ignored.get(decision.runner, {})
    for option in options:
        if option in ignored and not readers.get(option):
            why = f"{decision.label} of {name} accepts it, but does not read it: {ignored[option]}"
            raise AdmissionError(f"{option}: {why}")
        if not readers.get(option):
            near = difflib.get_close_matches(option, [field for field, places in readers.items() if places])
            hint = f"; near it: {', '.join(near)}" if near else ""
            raise AdmissionError(f"{option}: nothing reads it under {name} with {decision.label}{hint}")
    notes = tuple(f"{o}: {decision.label} does not read it: {ignored[o]}" for o in options if o in ignored)
    choice = None
    if name != "jaxrunner":
        choice = async_scheduling(facts, "0.28" if name == "vllm-0.28" else "0.33", decision.runner)
    return Explanation(decision, readers, choice, notes)


def policy_readers(name: str, runner: RunnerName) -> Readers:
    """Field -> the places that read it when the policy `name` has chosen `runner`.

    Of this package: options of `LLM` and fields of `RunnerConfig`, where what only the other runner reads counts as
    not read. Of vLLM: the facts that its rules ask for, and what its runner reads by itself.
    """
    readers = {f: places for f, places in facts_readers(_SOURCES[name]).items() if f not in _INTERNAL}
    if name == "jaxrunner":
        others = tuple(home.sources for other, home in HOMES.items() if other != runner)
        options = {o: tuple(p for p in places if not p.startswith(others)) for o, places in option_readers().items()}
        asked = readers.pop("override")
        facts = {field: places for field, places in readers.items() if places}
        return {**facts, **options, "runner": (*asked, *options["runner"])}
    policy = POLICIES[name]
    known = {field for p in policy.ignored.values() for field in p}
    for field in known - policy.ignored.get(runner, {}).keys():
        readers[field] = (*readers[field], f"vLLM's {policy.labels[runner]}")
    return readers
