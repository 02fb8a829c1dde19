"""Profilers see the ranges: those of the host in a profile, those of the device in the names of its operations."""

from __future__ import annotations

import re

import jax
import pytest

from jaxrunner.compile.programs import Program
from jaxrunner.timing.ranges import DEVICE_SCOPES, RANGES
from tests.runner.plans import both_runners, new, plan, run


def test_a_profile_shows_the_hosts_ranges(runner, tmp_path):
    def step(name):
        run(runner, plan({name: 3}, [new(name, [1, 2, 3], [1])]))
        runner.execute_model(plan({}, finished_req_ids={name}))

    step("before")
    with jax.profiler.trace(tmp_path):
        step("profiled")
    (file,) = tmp_path.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(file))
    names = {event.name for plane in profile.planes for line in plane.lines for event in line.events}
    assert set(RANGES) <= names


@both_runners
@pytest.mark.parametrize("kind", ["step", "begin", "finish"])
def test_operations_carry_the_scope_of_their_stage(runner, kind):
    programs = runner.table.programs
    program: Program = next(p for p in programs.all() if p.kind == kind)
    text = runner.table.get(program).compiled.as_text()
    found = {scope for scope in DEVICE_SCOPES if re.search(rf'op_name="[^"]*/{scope}/', text)}
    first, second = {"preprocess", "forward"}, {"sample", "postprocess"}
    assert found == {"step": first | second, "begin": first, "finish": second}[kind]
