"""One table of executables for each runner: compiled once; each test begins with an empty state."""

from __future__ import annotations

import pytest

from jaxrunner import DeviceRunner, HostRunner
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER


@pytest.fixture(scope="session")
def shared_table():
    model, weights = load_tiny("llama")
    return DeviceRunner(model, weights, CONFIG, ladder=LADDER).table


@pytest.fixture(scope="session")
def host_table():
    model, weights = load_tiny("llama")
    return HostRunner(model, weights, CONFIG, ladder=LADDER).table


@pytest.fixture
def runner(request):
    """A `DeviceRunner`, or what `both_runners` asks for."""
    is_host = getattr(request, "param", "device") == "host"
    model, weights = load_tiny("llama")
    fresh = (HostRunner if is_host else DeviceRunner)(model, weights, CONFIG, ladder=LADDER)
    fresh.table = request.getfixturevalue("host_table" if is_host else "shared_table")
    return fresh
