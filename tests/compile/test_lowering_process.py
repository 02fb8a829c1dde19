"""Programs lowered in a process of their own: who lowers what, and what happens when that process fails.

tests/runner/test_background_warm_up.py runs what comes out.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import threading

import jax
import pytest

from jaxrunner import BucketTable
from jaxrunner.compile import lowering_process
from jaxrunner.compile.lowering_process import LoweringProcess, LoweringProcessError, default_processes
from jaxrunner.compile.programs import Program
from jaxrunner.pallas.attention import attention_xla
from jaxrunner.pallas.target import Target, target, tracing_for
from tests.compile.test_compiler import programs_of
from tests.compile.test_warm_up import ADMIT, MOVES


@pytest.fixture(scope="module")
def process():
    process = LoweringProcess(programs_of())
    yield process
    process.close()


def test_settings_of_this_process_hold_there_too():
    names = set(lowering_process._settings())
    assert {"jax_threefry_partitionable", "jax_default_matmul_precision", "jax_enable_x64"} <= names
    assert not {"jax_platforms", "jax_default_device", "jax_compilation_cache_dir"} & names
    settings = {"jax_numpy_rank_promotion": "raise"}
    setup = lowering_process.Setup(programs_of(), target(), settings)
    requests, replies = io.BytesIO(pickle.dumps(setup) + pickle.dumps(ADMIT)), io.BytesIO()
    before = jax.config.jax_numpy_rank_promotion
    try:
        lowering_process.serve(requests, replies)
        assert jax.config.jax_numpy_rank_promotion == "raise"
    finally:
        jax.config.update("jax_numpy_rank_promotion", before)
    assert pickle.loads(replies.getvalue()).error == ""


def test_a_program_that_cannot_be_lowered_there_is_said(process):
    with pytest.raises(LoweringProcessError, match="AssertionError"):
        process.lower(Program("begin"))
    lowered = process.lower(ADMIT)
    assert lowered.lower_seconds > 0 < lowered.trace_seconds, "the process goes on"


def test_a_warm_up_shares_the_work_with_a_process(monkeypatch):
    """What is lowered here waits until something that was lowered there is ready."""
    table = BucketTable(programs_of())
    there, here = threading.Event(), []
    lower = table.compiler.lower

    def late(program):
        assert there.wait(60)
        here.append(program)
        return lower(program)

    monkeypatch.setattr(table.compiler, "lower", late)
    table.warm_up([ADMIT, MOVES], processes=1, progress=lambda *_: there.set())
    assert table.entries.keys() == {ADMIT, MOVES}
    assert len(here) == 1


class Dead:
    """A process that has ended before it was asked."""

    def __init__(self, programs):
        self.closed = False

    def lower(self, program):
        raise LoweringProcessError("the process has ended (killed)")

    def close(self):
        self.closed = True


def test_what_a_process_fails_to_lower_is_lowered_here(monkeypatch, caplog):
    monkeypatch.setattr("jaxrunner.compile.warm_up.LoweringProcess", Dead)
    table = BucketTable(programs_of())
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        table.warm_up([ADMIT, MOVES], processes=2)
    assert table.entries.keys() == {ADMIT, MOVES}
    assert all(entry.lower_seconds > 0 for entry in table.entries.values())


def test_a_process_that_is_killed_is_noticed():
    process = LoweringProcess(programs_of())
    process._process.kill()
    with pytest.raises(LoweringProcessError, match="has ended"):
        process.lower(ADMIT)
    process.close()


def test_processes_are_for_gpus_that_they_can_lower_for(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert default_processes(programs_of(), 40) == 0, "the CPU"
    with tracing_for(Target("gpu", "9.0", 132)):
        assert default_processes(programs_of(), 40) == 8
        assert default_processes(programs_of(), 9) == 3
        assert default_processes(programs_of(), 2) == 0
        assert default_processes(programs_of(implementation="triton"), 40) == 0
        assert default_processes(programs_of(implementation=lambda *a, **o: attention_xla(*a, **o)), 40) == 0
    with tracing_for(Target("gpu", "10.0", 148)):
        assert default_processes(programs_of(), 40) == 0


def test_the_target_is_the_default_device_unless_it_is_described():
    device = jax.devices()[0]
    assert target().platform == device.platform
    with tracing_for(Target("gpu", "9.0", 132, "NVIDIA H200")):
        assert target() == ("gpu", "9.0", 132, "NVIDIA H200")
