"""Which runner an engine builds, what it logs, and what it refuses."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from jaxrunner import LLM, DeviceRunner, HostRunner, RunnerConfig
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.selection import own, registry
from jaxrunner.selection.build import ENVIRONMENT, asked_runner, build_runner
from jaxrunner.selection.facts import Facts
from jaxrunner.selection.policy import decide
from tests.conftest import GOLDEN, load_tiny

TINY = str(GOLDEN / "tiny" / "llama")
CONFIG = RunnerConfig(2, 64, 16, 20, 4)


class Fake:
    """Stands for a HostRunner, whichever is there."""

    def __init__(self, model, weights, config, *, ladder=None, seed=0):
        self.arguments = (model, weights, config, ladder, seed)


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setitem(registry.HOMES, "host", registry.Home(__name__, "Fake"))


@pytest.fixture
def no_host(monkeypatch):
    monkeypatch.setitem(registry.HOMES, "host", registry.Home("jaxrunner.runner.no_such_runner", "HostRunner"))


def built(config, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        runner = build_runner(*load_tiny("llama"), config, seed=3)
    (line,) = (r for r in caplog.records if r.getMessage().startswith("runner: "))
    assert line.levelno == logging.INFO
    return runner, line.getMessage()


def test_one_line_says_which_runner_was_built_and_why(caplog, monkeypatch, host):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    runner, line = built(CONFIG, caplog)
    assert type(runner) is DeviceRunner
    assert line == "runner: DeviceRunner, it is the policy's choice for every model, and nothing stands against it"

    runner, line = built(dataclasses.replace(CONFIG, runner="host"), caplog)
    assert type(runner) is Fake
    assert runner.arguments[3:] == (None, 3)
    assert line == "runner: HostRunner, asked for by runner='host'"

    monkeypatch.setenv(ENVIRONMENT, "host")
    assert built(CONFIG, caplog)[1] == "runner: HostRunner, asked for by JAXRUNNER_RUNNER=host"
    runner, line = built(dataclasses.replace(CONFIG, runner="device"), caplog)
    assert type(runner) is DeviceRunner
    assert line.endswith("asked for by runner='device', which overrules JAXRUNNER_RUNNER=host")


def test_a_runner_that_is_not_there_is_refused_by_name(monkeypatch, no_host):
    model, weights = load_tiny("llama")
    with pytest.raises(NotBuiltError, match=r"HostRunner \(asked for by runner='host'\).* is not built"):
        build_runner(model, weights, dataclasses.replace(CONFIG, runner="host"))
    monkeypatch.setenv(ENVIRONMENT, "host")
    with pytest.raises(NotBuiltError, match="JAXRUNNER_RUNNER=host"):
        LLM(TINY, max_num_seqs=1, max_model_len=64)
    with pytest.raises(NotBuiltError, match="HostRunner is not built in this version"):
        registry.runner_class("host")


def test_the_override_has_three_states(monkeypatch):
    for unset in (None, ""):
        monkeypatch.delenv(ENVIRONMENT, raising=False) if unset is None else monkeypatch.setenv(ENVIRONMENT, unset)
        assert asked_runner(None) == (None, "")
    monkeypatch.setenv(ENVIRONMENT, "v2")
    with pytest.raises(AdmissionError, match="JAXRUNNER_RUNNER is 'v2'; use one of"):
        asked_runner(None)
    with pytest.raises(AdmissionError, match="runner is 'v2'; use one of"):
        dataclasses.replace(CONFIG, runner="v2")


def test_a_runner_refuses_a_configuration_that_asks_for_the_other():
    for runner, other in ((DeviceRunner, "host"), (HostRunner, "device")):
        with pytest.raises(AdmissionError, match=f"asks for runner '{other}'; `build_runner`"):
            runner(*load_tiny("llama"), dataclasses.replace(CONFIG, runner=other))


@pytest.mark.parametrize("kind", ["is_hybrid", "is_attention_free"])
def test_recurrent_models_are_forced_to_the_device_and_refused_until_they_are_built(kind, host):
    decision = decide(own.POLICY, Facts(**{kind: True}))
    assert decision.runner == "device"
    assert decision.answer.forced
    assert "recurrent layers" in decision.errors[0]
    asked = decide(own.POLICY, Facts(override="host", **{kind: True}))
    assert asked.runner == "host"
    assert "recurrent layers" in asked.errors[0]
