"""What reads a field is found in the source itself, so an option loses its readers when the code that read it goes."""

from __future__ import annotations

import shutil

import pytest

from jaxrunner import RunnerConfig
from jaxrunner.selection.facts import Facts
from jaxrunner.selection.readers import (
    PACKAGE,
    config_readers,
    environment_readers,
    facts_readers,
    option_readers,
)


@pytest.fixture
def package(tmp_path):
    """A copy of the package's sources, to be changed."""
    return shutil.copytree(PACKAGE, tmp_path / "jaxrunner", ignore=shutil.ignore_patterns("__pycache__"))


def change(package, file, old, new):
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new))


def test_something_reads_every_field_and_every_option():
    assert config_readers().keys() == RunnerConfig.__dataclass_fields__.keys()
    assert [name for name, places in option_readers().items() if not places] == []


def test_readers_are_those_of_the_source():
    readers = config_readers()
    runners = ("host_runner/runner.py: HostRunner.__init__", "runner/device_runner.py: DeviceRunner.__init__")
    assert readers["bucket_policy"] == runners
    assert "runner/config.py: empty_state" in readers["kernel_block_size"]  # through a property
    assert not any("RunnerConfig." in place for places in readers.values() for place in places)
    assert "engine/sizes.py: runner_config" in option_readers()["kv_bytes"]


def test_a_field_that_is_only_checked_is_read_by_nothing(package):
    change(package, "runner/config.py", "    runner: Runner", "    idle: int = 0\n    runner: Runner")
    change(package, "runner/config.py", "        kv_dtype(self", "        assert self.idle == 0\n        kv_dtype(self")
    assert config_readers(package)["idle"] == ()


def test_a_reader_that_goes_is_gone(package):
    for file in ("runner/device_runner.py", "host_runner/runner.py"):
        change(package, file, "policy=config.bucket_policy", 'policy="compile"')
    change(package, "engine/sizes.py", "(kv_bytes or DEFAULT_KV_BYTES)", "DEFAULT_KV_BYTES")
    change(package, "engine/sizes.py", "kv_bytes is None", "True")
    change(package, "engine/sizes.py", "kv_bytes is not None", "False")
    change(package, "engine/sizes.py", "kv_bytes={kv_bytes}", "kv_bytes")
    readers = option_readers(package)
    assert readers["bucket_policy"] == readers["kv_bytes"] == ()


def test_an_option_of_the_engine_that_is_dropped_is_read_by_nothing(package):
    change(package, "engine/llm.py", "prefix_caching=prefix_caching, ", "")
    assert option_readers(package)["prefix_caching"] == ()


def test_facts_are_read_by_the_rules_and_through_properties():
    old, new = facts_readers(["selection/vllm_028.py"]), facts_readers(["selection/vllm_033.py"])
    assert old.keys() == Facts.__dataclass_fields__.keys()
    assert old["is_moe"] == ("selection/vllm_028.py: default_model",)
    assert new["is_moe"] == ()  # the allow-list is gone
    assert old["dflash_layers"] == ("selection/vllm_028.py: forced_cases",)


def test_every_fact_means_something_to_some_policy():
    from jaxrunner.selection.explain import POLICIES, policy_readers

    read = {
        f for name in POLICIES for runner in ("device", "host") for f, p in policy_readers(name, runner).items() if p
    }
    ignored = {f for policy in POLICIES.values() for fields in policy.ignored.values() for f in fields}
    assert Facts.__dataclass_fields__.keys() - read - ignored == {"override_from"}


def test_environment_variables():
    assert environment_readers()["JAXRUNNER_RUNNER"] == ("selection/build.py",)
    assert {"JAXRUNNER_CACHE", "JAXRUNNER_COMPILATION_CACHE"} <= environment_readers().keys()
