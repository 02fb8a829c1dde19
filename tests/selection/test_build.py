"""Which runner an engine builds, what it logs, and what it refuses."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from jaxrunner import LLM, DeviceRunner, HostRunner, RunnerConfig
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.selection import build, own
from jaxrunner.selection.build import ENVIRONMENT, asked_runner, build_runner
from jaxrunner.selection.facts import Facts
from jaxrunner.selection.policy import decide
from tests.conftest import GOLDEN, load_tiny

TINY = str(GOLDEN / "tiny" / "llama")
CONFIG = RunnerConfig(2, 64, 16, 20, 4)


def built(config, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        runner = build_runner(*load_tiny("llama"), config, seed=3)
    (line,) = (r for r in caplog.records if r.getMessage().startswith("runner: "))
    assert line.levelno == logging.INFO
    return runner, line.getMessage()


def test_one_line_says_which_runner_was_built_and_why(caplog, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    runner, line = built(CONFIG, caplog)
    assert type(runner) is DeviceRunner
    assert line == "runner: DeviceRunner, it is the policy's choice for every model, and nothing stands against it"

    runner, line = built(dataclasses.replace(CONFIG, runner="host"), caplog)
    assert type(runner) is HostRunner
    assert runner._seed == 3
    assert line == "runner: HostRunner, asked for by runner='host'"

    monkeypatch.setenv(ENVIRONMENT, "host")
    assert built(CONFIG, caplog)[1] == "runner: HostRunner, asked for by JAXRUNNER_RUNNER=host"
    runner, line = built(dataclasses.replace(CONFIG, runner="device"), caplog)
    assert type(runner) is DeviceRunner
    assert line.endswith("asked for by runner='device', which overrules JAXRUNNER_RUNNER=host")


def test_an_engine_takes_the_runner_that_is_asked_for(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, "host")
    assert type(LLM(TINY, max_num_seqs=1, max_model_len=64).runner) is HostRunner
    assert type(LLM(TINY, max_num_seqs=1, max_model_len=64, runner="device").runner) is DeviceRunner


def test_what_a_runner_cannot_do_is_refused_by_name(monkeypatch):
    facts = Facts(is_hybrid=True, override="host", override_from="runner='host'")
    monkeypatch.setattr(build, "Facts", lambda **_: facts)
    with pytest.raises(NotBuiltError, match=r"HostRunner \(asked for by runner='host'\): HostRunner does not support"):
        build_runner(*load_tiny("llama"), CONFIG)


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
def test_recurrent_models_are_forced_to_the_device_and_refused_until_they_are_built(kind):
    decision = decide(own.POLICY, Facts(**{kind: True}))
    assert decision.runner == "device"
    assert decision.answer.forced
    assert "recurrent layers" in decision.errors[0]
    asked = decide(own.POLICY, Facts(override="host", **{kind: True}))
    assert asked.runner == "host"
    assert "recurrent layers" in asked.errors[0]
