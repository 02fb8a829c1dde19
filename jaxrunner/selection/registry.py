"""The runners there are, by name: where each lives, and what all of them share."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, Protocol

from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import Programs
from jaxrunner.compile.table import BucketTable
from jaxrunner.contract import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from jaxrunner.models.model import Model
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.runner.output import AsyncOutput
from jaxrunner.selection.facts import RunnerName
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.timing.ranges import Annotate


class Runner(Protocol):
    """What an engine uses of a runner."""

    model: Model
    weights: Any
    config: RunnerConfig
    ladder: Ladder
    table: BucketTable
    groups: tuple[KVGroup, ...]

    annotate: Annotate

    def __init__(
        self, model: Model, weights: Any, config: RunnerConfig, *, ladder: Ladder | None = None, seed: int = 0
    ): ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None: ...

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> ModelRunnerOutput | AsyncOutput: ...

    @staticmethod
    def programs_of(model: Model, weights: Any, config: RunnerConfig, ladder: Ladder) -> Programs: ...

    def warm_up(self, **options: Any) -> None: ...


@dataclasses.dataclass(frozen=True)
class Home:
    """module, class_name: where the runner is. It is imported when it is built. has_package: everything beside the
    module is part of this runner alone."""

    module: str
    class_name: str
    has_package: bool = False

    @property
    def sources(self) -> str:
        """What the paths of its own source files begin with, relative to this package."""
        module = self.module.rpartition(".")[0] + "." if self.has_package else self.module
        return module.removeprefix("jaxrunner.").replace(".", "/")


HOMES: dict[RunnerName, Home] = {
    "device": Home("jaxrunner.runner.device_runner", "DeviceRunner"),
    "host": Home("jaxrunner.host_runner.runner", "HostRunner", has_package=True),
}


def runner_class(name: RunnerName) -> type[Runner]:
    """The class of a runner."""
    home = HOMES[name]
    return getattr(importlib.import_module(home.module), home.class_name)
