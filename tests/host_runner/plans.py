"""A host runner over the tiny golden model with the executables of the session."""

from __future__ import annotations

import dataclasses

from jaxrunner import HostRunner
from tests.runner.plans import CONFIG, LADDER


def host_runner(model_and_weights, table, **changes) -> HostRunner:
    """changes: of the configuration."""
    runner = HostRunner(*model_and_weights, dataclasses.replace(CONFIG, **changes), ladder=LADDER)
    runner.table = table
    return runner
