"""The list of mutations is sound, and a fast part of it is killed here; the rest: `python -m tests.mutations.run`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutations import run
from tests.mutations.mutation import Mutation
from tests.mutations.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
FAST = [m for m in MUTATIONS if m.fast]
REFUSED = ("tests/state/test_codec.py::test_a_scalar_past_32_bits_is_refused",)
NOTHING = Mutation("nothing", "state/codec.py", "vector.flags.writeable = False", "vector.setflags(write=0)", REFUSED)
GONE = Mutation("gone", "state/codec.py", "no such text", "", REFUSED)
every_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)


@every_mutation
def test_the_text_to_replace_occurs_once_and_the_result_is_python(mutation):
    ast.parse(run.mutated(mutation))
    assert mutation.old != mutation.new


@every_mutation
def test_the_named_tests_exist(mutation):
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        functions = {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
        assert name.partition("[")[0] in functions, test


def test_names_are_unique():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


@pytest.fixture(scope="module")
def outcomes():
    """name -> outcome, of one run: each process that runs tests imports JAX anew."""
    return {outcome.mutation.name: outcome for outcome in run.run([*FAST, NOTHING, GONE])}


def test_fast_mutations_are_killed(outcomes):
    assert len(FAST) == 8
    assert [str(outcomes[m.name]) for m in FAST if not outcomes[m.name].killed] == []


def test_a_change_that_means_nothing_survives(outcomes):
    """The runner reports a test that passes, and a text that is not there, instead of calling either a success."""
    assert outcomes["nothing"].survived == NOTHING.tests
    assert not outcomes["nothing"].killed
    assert "occurs 0 times" in outcomes["gone"].error
    assert not outcomes["gone"].killed
