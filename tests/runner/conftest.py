"""One table of executables for each runner: compiled once; each test begins with an empty state."""

from __future__ import annotations

import functools

import pytest

from jaxrunner import DeviceRunner, HostRunner
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER


@functools.cache
def table_of(runner_class, config=CONFIG):
    """A fixture that another directory imports is another fixture; what it gives is the same."""
    return runner_class(*load_tiny("llama"), config, ladder=LADDER).table


@pytest.fixture(scope="session")
def shared_table():
    return table_of(DeviceRunner)


@pytest.fixture(scope="session")
def host_table():
    return table_of(HostRunner)


@pytest.fixture
def runner(request):
    """A `DeviceRunner`, or what `both_runners` asks for."""
    runner_class = HostRunner if getattr(request, "param", "device") == "host" else DeviceRunner
    fresh = runner_class(*load_tiny("llama"), CONFIG, ladder=LADDER)
    fresh.table = table_of(runner_class)
    return fresh
