"""`build_runner`: the runner of a configuration, and one line of the log that says which it is and why."""

from __future__ import annotations

import logging
import os
from typing import Any

from jaxrunner.compile.ladder import Ladder
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.models.model import Model
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.selection import own
from jaxrunner.selection.facts import RUNNER_NAMES, Facts, RunnerName
from jaxrunner.selection.policy import Decision, decide
from jaxrunner.selection.registry import Runner, runner_class

ENVIRONMENT = "JAXRUNNER_RUNNER"
logger = logging.getLogger("jaxrunner")


def build_runner(
    model: Model, weights: Any, config: RunnerConfig, *, ladder: Ladder | None = None, seed: int = 0
) -> Runner:
    """The runner that `config.runner`, JAXRUNNER_RUNNER or the policy chooses; the arguments are those of its class.

    Logs one line, at level INFO: which runner is built, and why. Raises as `choose_runner` does. `jaxrunner explain`
    shows the whole way.
    """
    decision = choose_runner(model, config)
    runner = runner_class(decision.runner)(model, weights, config, ladder=ladder, seed=seed)
    logger.info("runner: %s, %s", decision.label, decision.answer.why)
    return runner


def choose_runner(model: Model, config: RunnerConfig) -> Decision:
    """What `build_runner` builds. Raises NotBuiltError if that cannot run what is asked, AdmissionError for an unknown
    name in JAXRUNNER_RUNNER."""
    override, source = asked_runner(config.runner)
    # A `Model` has attention in every layer; a recurrent one is refused when it is loaded.
    facts = Facts(override=override, override_from=source, architectures=(model.architecture,))
    decision = decide(own.POLICY, facts)
    if decision.errors:
        raise NotBuiltError(f"{decision.label} ({decision.answer.why}): {'; '.join(decision.errors)}")
    return decision


def asked_runner(option: RunnerName | None) -> tuple[RunnerName | None, str]:
    """(the runner that is asked for, None to leave it to the policy; by what). The option outweighs the environment."""
    value = os.environ.get(ENVIRONMENT) or None
    for name, asked in (("runner", option), (ENVIRONMENT, value)):
        if asked not in (None, *RUNNER_NAMES):
            raise AdmissionError(f"{name} is {asked!r}; use one of {RUNNER_NAMES}, or leave it unset for the policy")
    if option is not None:
        overruled = f", which overrules {ENVIRONMENT}={value}" if value not in (None, option) else ""
        return option, f"runner={option!r}{overruled}"
    return value, f"{ENVIRONMENT}={value}" if value else ""  # type: ignore[return-value]
