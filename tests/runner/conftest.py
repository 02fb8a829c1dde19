"""One runner per module: its executables are compiled once; each test begins with an empty state."""

from __future__ import annotations

import functools

import pytest

from jaxrunner import DeviceRunner
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER


@functools.cache
def _shared_table():
    """A session's fixture alone would be made again for each folder that imports it."""
    model, weights = load_tiny("llama")
    return DeviceRunner(model, weights, CONFIG, ladder=LADDER).table


@pytest.fixture(scope="session")
def shared_table():
    return _shared_table()


@pytest.fixture
def runner(shared_table):
    model, weights = load_tiny("llama")
    fresh = DeviceRunner(model, weights, CONFIG, ladder=LADDER)
    fresh.table = shared_table
    return fresh
