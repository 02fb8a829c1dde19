"""One runner per module: its executables are compiled once; each test begins with an empty state."""

from __future__ import annotations

import pytest

from jaxrunner import DeviceRunner
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER


@pytest.fixture(scope="session")
def shared_table():
    model, weights = load_tiny("llama")
    return DeviceRunner(model, weights, CONFIG, ladder=LADDER).table


@pytest.fixture
def runner(shared_table):
    model, weights = load_tiny("llama")
    fresh = DeviceRunner(model, weights, CONFIG, ladder=LADDER)
    fresh.table = shared_table
    return fresh
