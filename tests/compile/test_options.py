"""XLA options: chosen by size, for the executable alone, and only where they were measured."""

from __future__ import annotations

import jax
import pytest

from jaxrunner import Bucket, BucketTable, Ladder, compiler_options
from jaxrunner.compile import options
from jaxrunner.compile.compiler import LoweredProgram
from tests.compile.test_table import programs_of


def test_a_cpu_takes_the_defaults():
    assert compiler_options(Bucket("decode", 64, 64)) == {}


@pytest.mark.parametrize(("tokens", "measured"), [(1, False), (32, False), (33, True), (128, True), (129, False)])
def test_a_gpu_takes_what_was_measured_for_its_size(monkeypatch, tokens, measured):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given = compiler_options(Bucket("decode", tokens, tokens))
    assert given == (options.LIBRARY_GEMMS if measured else {})
    given["changed"] = True
    assert "changed" not in options.LIBRARY_GEMMS


def test_the_users_options_come_last(monkeypatch):
    seen = []
    monkeypatch.setattr("jaxrunner.compile.compiler.options_for", lambda n: {"xla_a": n, "xla_b": 0})
    table = BucketTable(programs_of(Ladder((2,), (4,), (2,), tiers=("greedy",))), compiler_options={"xla_b": 1})

    class Lowered:
        def compile(self, compiler_options):
            seen.append(compiler_options)
            raise StopIteration

    for program in table.programs.all():
        with pytest.raises(StopIteration):
            table.compiler.compile(LoweredProgram(program, Lowered(), 0.0, 0.0))
    assert {o["xla_b"] for o in seen} == {1}
    assert {2, 4} <= {o["xla_a"] for o in seen}
