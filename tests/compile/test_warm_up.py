"""Warm-ups in the background: what is made first, what is waited for, and where errors go. Nothing is compiled here;
tests/runner/test_background_warm_up.py does."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import jax
import pytest

from jaxrunner import BucketTable, Ladder, init_state
from jaxrunner.compile.compiler import LoweredProgram
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.programs import FIRST_TOKEN_PROGRAMS, Program, ProgramSet
from jaxrunner.state.block_moves import MOVES_PER_CALL
from tests.conftest import load_tiny

LADDER = Ladder((1, 2), (4, 16), (1, 2), tiers=("greedy",))
ADMIT, MOVES = Program("admit", size=64), Program("moves", size=MOVES_PER_CALL)
LARGE, SMALL = (Program("begin", LADDER.mixed_bucket(n, "greedy")) for n in (16, 4))


def table_of(**options) -> BucketTable:
    model, weights = load_tiny("llama")
    state = jax.eval_shape(lambda: init_state(model, max_requests=2, max_model_len=64, num_blocks=8, block_size=8))
    return BucketTable(ProgramSet(model, weights, state, LADDER), **options)


class Stub:
    """In place of a compiler: instant, but for lowering the programs in `held` and compiling those in `slow`, which
    wait until `go` is set."""

    cache = programs = None

    def __init__(self, *held: Program):
        self.held, self.go, self.begun = held, threading.Event(), threading.Event()
        self.slow: tuple[Program, ...] = ()
        self.lowered: list[Program] = []
        self.compiled: list[Program] = []

    def cached(self, program):
        return False

    def lower(self, program):
        self.lowered.append(program)
        if program in self.held:
            self.begun.set()
            assert self.go.wait(60)
        return LoweredProgram(program, None, 0.0, 0.0)

    def compile(self, todo):
        self.compiled.append(todo.program)
        if todo.program in self.slow:
            self.begun.set()
            assert self.go.wait(60)
        return Entry(todo.program, None, compile_seconds=1.0)

    def trim_cache(self):
        pass


@pytest.fixture
def table():
    table = table_of(policy="refuse")
    table.compiler = Stub()
    yield table
    table.compiler.go.set()
    table.join()


def test_the_next_larger_stands_in_and_that_is_said_once(table, caplog):
    table.compiler.held = (SMALL,)
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        table.warm_up(background=True)
        assert table.compiler.begun.wait(60)
        for _ in range(3):
            assert table.get(SMALL).program == LARGE
        table.compiler.go.set()
        table.join()
    assert table.get(SMALL).program == SMALL
    assert table.misses == 3
    assert caplog.text.count("larger ones stand in for them") == 1
    assert f"all {len(table.programs.all())} executables are ready" in caplog.text


def test_a_program_that_nothing_can_replace_is_made_next(table):
    first, *_, last = table.programs.by_urgency()
    table.compiler.held = (first,)
    table.warm_up(background=True)
    assert table.compiler.begun.wait(60)
    threading.Timer(0.2, table.compiler.go.set).start()
    assert table.get(last).program == last
    table.join()
    assert table.compiler.lowered[:2] == [first, last]


def test_nothing_is_begun_beside_what_a_first_token_needs(table):
    *head, _ = urgent = table.programs.by_urgency()[:FIRST_TOKEN_PROGRAMS]
    table.compiler.held = (urgent[-1],)
    table.warm_up(background=True, threads=8)
    assert table.compiler.begun.wait(60)
    time.sleep(0.2)
    assert table.compiler.lowered == urgent
    assert set(table.entries) == set(head)
    table.compiler.go.set()
    table.join()
    assert set(table.entries) == set(table.programs.all())


def test_what_the_second_token_needs_is_lowered_meanwhile_and_compiled_after_the_first(table):
    *head, then = table.programs.by_urgency()[:FIRST_TOKEN_PROGRAMS]
    table.compiler.slow = (head[0],)
    table.warm_up(background=True, threads=8)
    assert table.compiler.begun.wait(60)
    time.sleep(0.2)
    assert table.compiler.lowered == [*head, then]
    assert set(table.compiler.compiled) == set(head)
    table.compiler.go.set()
    assert table.get(then).program == then
    table.join()
    assert table.compiler.compiled[len(head)] == then


def test_a_larger_one_in_work_is_waited_for_before_the_exact_one(table):
    table.compiler.held = (LARGE,)
    table.warm_up(background=True)
    assert table.compiler.begun.wait(60)
    threading.Timer(0.2, table.compiler.go.set).start()
    assert table.get(SMALL).program in (LARGE, SMALL)
    table.join()
    assert table.compiler.lowered.index(SMALL) > 1, "the larger one was in work already: nothing had to be moved"


def test_a_warm_up_in_front_waits_for_the_one_behind(table):
    table.warm_up(background=True)
    table.warm_up()
    assert table.entries.keys() == set(table.programs.all())
    assert len(table.compiler.lowered) == len(set(table.compiler.lowered))


def test_one_at_a_time_and_no_bar(table):
    table.compiler.held = tuple(table.programs.all())
    table.warm_up(background=True)
    with pytest.raises(RuntimeError, match="in the background already"):
        table.warm_up(background=True)
    with pytest.raises(ValueError, match="no bar"):
        table_of().warm_up(background=True, progress=True)


def test_no_more_is_lowered_than_can_be_compiled_soon(table):
    """Else a program that somebody waits for would stand behind all others."""
    full = threading.Event()
    table.compiler.compile = lambda todo: full.wait(60) and Entry(todo.program, None)
    table.warm_up(background=True, threads=1)
    last = table.programs.by_urgency()[-1]
    threading.Timer(0.3, full.set).start()
    table.get(last)
    table.join()
    assert table.compiler.lowered.index(last) <= 2


@pytest.mark.parametrize("work", ["lower", "compile", "cached"])
def test_an_error_in_the_background_reaches_who_waits_and_who_checks(table, caplog, work):
    go = threading.Event()

    def fail(program):
        assert go.wait(60)
        raise ValueError("no such instruction")

    setattr(table.compiler, work, fail)
    table.warm_up(background=True)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(ValueError, match="no such instruction"):
        table.get(MOVES)
    with pytest.raises(ValueError, match="no such instruction"):
        table.check()
    table.check()
    assert "the background has failed: no such instruction" in caplog.text


def test_an_error_in_front_is_raised(table):
    table.compiler.compile = lambda program: 1 / 0
    with pytest.raises(ZeroDivisionError):
        table.warm_up([ADMIT, MOVES])


ENDING = """
from tests.compile.test_warm_up import table_of
table_of().warm_up(background=True)
"""


def test_an_ending_interpreter_does_not_wait_for_the_whole_ladder():
    """Only for what is in work: the thread neither keeps the process alive nor breaks its end."""
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
