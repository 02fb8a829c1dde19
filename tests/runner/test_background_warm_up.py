"""Runners whose ladder is made elsewhere or meanwhile: equal tokens, in place, and errors before a step."""

from __future__ import annotations

import threading

import pytest

from jaxrunner import Ladder
from jaxrunner.compile.compiler import LoweredProgram
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.lowering_process import LoweringProcess
from jaxrunner.errors import BucketMissError
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER, both_runners, kept_on_device, new, plan, run

LARGER = Ladder(decode=(1, 4), mixed=(8, 32), finish=(1, 4))


def generate(runner) -> list[int]:
    out = run(runner, plan({"a": 3}, [new("a", [5, 9, 17], [1, 2])]))["a"]
    for _ in range(4):
        out += run(runner, plan({"a": 1}))["a"]
    return out


@both_runners
def test_tokens_do_not_depend_on_what_is_ready(runner, monkeypatch):
    """The rungs of `runner` are there, the smaller ones are held back until all tokens have been sampled."""
    serving = type(runner)(*load_tiny("llama"), CONFIG, ladder=LARGER)
    opened, known = threading.Event(), set(runner.table.programs.all())
    wanted = {serving.table.programs.first(LARGER.decode_bucket(4, "greedy"))}

    def compile_(todo):
        program = todo.program
        if program not in known:
            assert opened.wait(60)
            return Entry(program, None)
        used = program.kind in ("admit", "step") or program in (first, finish)
        return runner.table.get(program) if used else Entry(program, None)

    first = serving.table.programs.first(LARGER.mixed_bucket(32, "greedy"))
    finish = serving.table.programs.finish(4, "greedy")
    monkeypatch.setattr(serving.table.compiler, "lower", lambda program: LoweredProgram(program, None, 0.0, 0.0))
    monkeypatch.setattr(serving.table.compiler, "compile", compile_)
    serving.warm_up(background=True, threads=len(serving.table.programs.all()))
    try:
        assert generate(serving) == generate(runner)
        used = {program for program, entry in serving.table.entries.items() if entry.hits and program.kind != "admit"}
        assert used == {first, finish, *wanted}
    finally:
        opened.set()
        serving.table.join()


@both_runners
def test_an_error_of_the_background_is_raised_before_a_step_changes_anything(runner, monkeypatch):
    failing = type(runner)(*load_tiny("llama"), CONFIG, ladder=LADDER)

    def fail(program):
        raise ValueError("no such instruction")

    monkeypatch.setattr(failing.table.compiler, "lower", fail)
    failing.warm_up(background=True)
    failing.table._background._thread.join()
    with pytest.raises(ValueError, match="no such instruction"):
        generate(failing)
    assert len(failing.rows) == 0
    failing.table = runner.table
    assert generate(failing) == generate(runner)


@both_runners
def test_executables_lowered_in_another_process_do_the_same_in_place(runner):
    model, weights = load_tiny("llama")
    other = type(runner)(model, weights, CONFIG, ladder=LADDER)
    process = LoweringProcess(other.table.programs)
    other.table.compiler.lower = process.lower
    kv = kept_on_device(other).kv.blocks[0]
    place = kv.unsafe_buffer_pointer()
    try:
        assert generate(other) == generate(runner)
    finally:
        process.close()
    broken, other.weights = other.weights, {**weights, "norm": weights["norm"][:-1]}
    with pytest.raises(BucketMissError, match=r"weights\['norm'\]"):
        run(other, plan({"a": 1}))
    other.weights = broken
    assert kv.is_deleted()
    assert kept_on_device(other).kv.blocks[0].unsafe_buffer_pointer() == place
    for program, entry in other.table.entries.items():
        made_here = runner.table.entries[program]
        assert entry.temp_bytes == pytest.approx(made_here.temp_bytes, rel=0.05, abs=256), program
