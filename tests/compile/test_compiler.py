"""From programs to executables: that a second start only loads, and what the key of an executable holds."""

from __future__ import annotations

import functools

import jax
import pytest

from jaxrunner import BucketTable, Ladder, init_state
from jaxrunner.compile import compiler as compiler_module
from jaxrunner.compile.buckets import TIERS
from jaxrunner.compile.compiler import Compiler
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.compile.executable_cache import ExecutableCache
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.pallas.attention import attention_xla
from jaxrunner.state.block_moves import MOVES_PER_CALL
from tests.conftest import load_tiny

ADMIT, MOVES = Program("admit", size=64), Program("moves", size=MOVES_PER_CALL)
LADDER = Ladder(decode=(1, 2), mixed=(4, 16), finish=(2,), tiers=("greedy",))


@functools.cache
def programs_of(ladder: Ladder = LADDER, num_blocks: int = 8, implementation=None) -> ProgramSet:
    model, weights = load_tiny("llama")
    state = init_state(model, max_requests=2, max_model_len=64, num_blocks=num_blocks, block_size=8)
    return ProgramSet(model, weights, state, ladder, implementation=implementation)


@pytest.fixture
def cache(tmp_path):
    return ExecutableCache(tmp_path / "cache")


def test_a_second_table_only_loads(cache):
    todo = [p for p in programs_of().all() if p.kind in ("admit", "moves")]
    first = BucketTable(programs_of(), cache=cache)
    first.warm_up(todo)
    with CompileCounter() as counter:
        second = BucketTable(programs_of(), cache=ExecutableCache(cache.directory))
        second.warm_up(todo)
    assert counter.count == 0
    for program in todo:
        made, loaded = first.entries[program], second.entries[program]
        assert made.compile_seconds > 0 == made.load_seconds
        assert loaded.load_seconds > 0 == loaded.compile_seconds == loaded.lower_seconds
        assert loaded.temp_bytes == made.temp_bytes
    assert second.compiled_on_demand == 0


def test_a_program_asked_for_on_demand_is_loaded_too(cache):
    BucketTable(programs_of(), cache=cache).get(ADMIT)
    table = BucketTable(programs_of(), cache=cache)
    assert table.get(ADMIT).load_seconds > 0
    assert (table.misses, table.compiled_on_demand) == (1, 0)


def test_a_damaged_entry_is_compiled_in_the_same_warm_up_and_repaired(cache, caplog):
    BucketTable(programs_of(), cache=cache).warm_up([ADMIT, MOVES])
    for file in cache.files():
        if file.program == str(ADMIT):
            data = bytearray(file.path.read_bytes())
            data[len(data) // 2] ^= 1
            file.path.write_bytes(data)
    table = BucketTable(programs_of(), cache=cache)
    table.warm_up([ADMIT, MOVES])
    assert f"{ADMIT} is made anew" in caplog.text
    assert table.entries[ADMIT].compile_seconds > 0
    assert table.entries[MOVES].load_seconds > 0
    assert [file.problem for file in cache.files()] == [None, None]


def test_everything_that_decides_an_executable_is_in_its_key(cache, monkeypatch):
    def key(**options):
        programs = programs_of(**{k: v for k, v in options.items() if k != "compiler"})
        return Compiler(programs, cache=cache, **options.get("compiler", {}))._key(ADMIT).digest

    first = key()
    assert key() == first
    others = [
        key(num_blocks=9),
        key(implementation="xla"),
        key(compiler={"options": {"xla_cpu_enable_fast_math": True}}),
        Compiler(programs_of(), cache=cache)._key(MOVES).digest,
    ]
    monkeypatch.setattr(compiler_module, "environment", lambda: {"packages": {"jax": "0.0"}})
    others.append(key())
    assert len({first, *others}) == 6


def test_an_attention_of_the_users_own_is_not_kept(cache):
    def mine(*args, **options):
        return attention_xla(*args, **options)

    table = BucketTable(programs_of(implementation=mine), cache=cache)
    assert table.get(ADMIT).compile_seconds > 0
    assert cache.files() == []


def test_what_comes_from_jaxs_own_cache_is_not_kept(cache, tmp_path):
    """It would be serialised without the code of its fusions."""
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    from jax.experimental.compilation_cache import compilation_cache

    try:
        for name, value in zip(before, (str(tmp_path / "jax"), 0.0, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        Compiler(programs_of()).make(ADMIT)
        Compiler(programs_of(), cache=cache).make(ADMIT)
        assert cache.files() == []
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_largest_programs_of_each_kind_come_first():
    ladder = Ladder(decode=(1, 2), mixed=(4, 16), finish=(1, 2))
    order = programs_of(ladder).by_urgency()
    assert sorted(map(str, order)) == sorted(map(str, programs_of(ladder).all()))
    needed = {"begin mixed[t16/r2]", "admit[64]", "finish[2]/greedy", "decode[2x1]/greedy"}
    assert set(map(str, order[:4])) == needed
    assert {str(p) for p in order[: 4 + len(TIERS)]} == needed | {
        "begin decode[2x1]",
        *(f"finish[2]/{tier}" for tier in TIERS[1:]),
    }
