"""The cache of executables: what comes out does what went in, and what is damaged, stale or foreign is never used."""

from __future__ import annotations

import errno
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.compile import cache_key, executable_cache
from jaxrunner.compile.cache_key import Key, environment
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.compile.executable_cache import ENVIRONMENT, ExecutableCache, open_cache

KEY = Key("tanh", {"version": 1})


@functools.cache
def tanh():
    """A compiled program that donates its argument."""
    shape = jax.ShapeDtypeStruct((1024,), jnp.float32)
    return jax.jit(lambda x: {"y": jnp.tanh(x) * 2}, donate_argnums=0).lower(shape).compile()


@pytest.fixture
def cache(tmp_path):
    return ExecutableCache(tmp_path / "cache")


@pytest.fixture
def stored(cache):
    cache.store(KEY, tanh(), {"temp_bytes": 7})
    (path,) = cache.directory.glob("*.executable")
    return path


def x():
    return jnp.arange(1024, dtype=jnp.float32) / 1000


def test_an_executable_comes_back_with_its_structure_its_donation_and_its_facts(cache, stored):
    assert cache.holds(KEY)
    with CompileCounter() as counter:
        loaded, facts = ExecutableCache(cache.directory).load(KEY)
    assert counter.count == 0
    assert facts == {"temp_bytes": 7}
    given = x()
    place = given.unsafe_buffer_pointer()
    result = loaded(given)["y"]
    assert given.is_deleted()
    assert result.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(result, tanh()(x())["y"])


def test_another_key_finds_nothing(cache, stored, caplog):
    assert cache.load(Key("tanh", {"version": 2})) is None
    assert not cache.holds(Key("tanh", {"version": 2}))
    assert caplog.text == ""


@pytest.mark.parametrize("part", ["magic", "signature", "header", "pickle", "end"])
def test_a_flipped_bit_anywhere_is_found_before_anything_is_unpickled(cache, stored, part, monkeypatch, caplog):
    data = bytearray(stored.read_bytes())
    start = len(executable_cache.MAGIC) + executable_cache.MAC_BYTES
    payload = start + 4 + int.from_bytes(data[start : start + 4], "big")
    place = {"magic": 3, "signature": len(executable_cache.MAGIC), "header": start + 9, "pickle": payload, "end": -1}
    data[place[part]] ^= 0x10
    stored.write_bytes(data)
    monkeypatch.setattr(pickle, "loads", lambda data: pytest.fail("damaged bytes were unpickled"))
    assert cache.load(KEY) is None
    assert "tanh is made anew" in caplog.text
    cache.store(KEY, tanh(), {})
    monkeypatch.undo()
    assert cache.load(KEY) is not None, "the entry was not repaired"


@pytest.mark.parametrize("size", [0, 30, 60, -1])
def test_an_entry_cut_short_is_not_used(cache, stored, size, caplog):
    stored.write_bytes(stored.read_bytes()[:size])
    assert cache.load(KEY) is None
    assert "is made anew" in caplog.text


def test_an_entry_signed_elsewhere_is_not_used(cache, stored, tmp_path, caplog):
    other = ExecutableCache(tmp_path / "other")
    (other.directory / stored.name).write_bytes(stored.read_bytes())
    assert other.load(KEY) is None
    assert "was not written here" in caplog.text


def test_an_entry_under_another_name_is_not_used(cache, stored, caplog):
    wanted = Key("tanh", {"version": 2})
    stored.rename(cache._path(wanted))
    assert cache.load(wanted) is None
    assert "made for something else" in caplog.text


def test_another_users_entry_is_not_used(cache, stored, monkeypatch, caplog):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert cache.load(KEY) is None
    assert f"belongs to user {me}" in caplog.text


def test_an_executable_that_xla_does_not_take_is_made_anew(cache, stored, monkeypatch, caplog):
    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: another driver")

    monkeypatch.setattr(executable_cache.serialize_executable, "deserialize_and_load", fail)
    assert cache.load(KEY) is None
    assert "another driver" in caplog.text


def test_a_full_disk_is_said_once_and_nothing_is_left_behind(cache, monkeypatch, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("jaxrunner.compile.private_files.os.replace", full)
    for i in range(3):
        cache.store(Key("tanh", {"version": i}), tanh(), {})
    assert caplog.text.count("No space left") == 1
    assert [path.name for path in cache.directory.iterdir()] == ["secret"]
    assert cache.load(KEY) is None


def test_a_program_with_a_callback_is_left_out(cache, caplog):
    def call(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4,), jnp.float32), x)

    cache.store(KEY, jax.jit(call).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile(), {})
    assert not cache.holds(KEY)
    assert caplog.text == ""


PROGRAM = """
import sys, jax, jax.numpy as jnp
from pathlib import Path
from jaxrunner.compile.cache_key import Key
from jaxrunner.compile.executable_cache import ExecutableCache
compiled = jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()
cache = ExecutableCache(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for i in range(20):
    for n in range(3):
        cache.store(Key("tanh", {"n": n}), compiled, {"by": sys.argv[2]})
        loaded, facts = cache.load(Key("tanh", {"n": n}))
        assert float(loaded(jnp.zeros(8))[0]) == 0
"""


def test_two_processes_that_write_the_same_entries_at_once(tmp_path):
    """Neither ever sees half an entry, and their secrets agree though both had none at first."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([*command, name], **pipes) for name in "ab"]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    outputs = [process.communicate("\n") for process in both]
    for process, (_, errors) in zip(both, outputs, strict=True):
        assert process.returncode == 0, errors
        assert "made anew" not in errors
    files = ExecutableCache(tmp_path / "cache").files()
    assert [file.problem for file in files] == [None] * 3
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_files_lists_what_is_there_and_what_is_wrong_with_it(cache, stored):
    cache.store(Key("sin", {"version": 1}), tanh(), {})
    stored.write_bytes(stored.read_bytes()[:-1])
    found = {file.program: file.problem for file in cache.files()}
    assert found.pop("sin") is None
    (problem,) = found.values()
    assert "damaged" in problem


def test_trimming_keeps_what_was_used_last(cache):
    for i in range(4):
        cache.store(Key("tanh", {"version": i}), tanh(), {})
        os.utime(cache._path(Key("tanh", {"version": i})), (i, i))
    cache.load(Key("tanh", {"version": 0}))
    size = cache.files()[0].num_bytes
    assert cache.trim(keep=2 * size + 100) == 2
    assert sorted(file.parts["version"] for file in cache.files()) == [0, 3]
    assert cache.trim(keep=0) == 2
    assert cache.files() == []


def test_where_it_is(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("JAXRUNNER_CACHE", str(tmp_path))
    monkeypatch.setenv(ENVIRONMENT, "")
    assert open_cache().directory == tmp_path / "executables"
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "mine"))
    assert open_cache().directory == tmp_path / "mine"
    assert open_cache("off") is None
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert open_cache() is None
    assert open_cache(tmp_path / "named").directory == tmp_path / "named"
    assert caplog.text == ""
    (tmp_path / "file").write_text("")
    assert open_cache(tmp_path / "file" / "x") is None
    assert "no cache of executables" in caplog.text


def test_the_environment_is_plain_and_says_what_decides_an_executable():
    parts = environment()
    assert json.loads(json.dumps(parts)) == parts
    assert parts["packages"]["jax"] == jax.__version__
    assert parts["device"]["kind"] == jax.devices()[0].device_kind
    assert Key("a", parts).digest == Key("a", environment()).digest
    jax.config.update("jax_debug_nans", True)
    try:
        assert environment()["settings"] != parts["settings"]
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize(
    ("name", "value"),
    [("source_digest", lambda: "edited"), ("_version", lambda name: "0"), ("driver_version", lambda: "1.2")],
)
def test_other_sources_versions_and_drivers_have_other_keys(monkeypatch, name, value):
    before = Key("a", environment()).digest
    monkeypatch.setattr(cache_key, name, value)
    assert Key("a", environment()).digest != before


def test_an_edited_source_file_changes_the_digest(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("x = 1\n")
    (tmp_path / "b" / "module.py").write_text("x = 2\n")
    first, second = (cache_key.source_digest(Path(tmp_path / name)) for name in ("a", "b"))
    assert first != second
