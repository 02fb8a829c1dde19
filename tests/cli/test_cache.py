"""`jaxrunner cache`: what it lists, that `check` finds damage, that `clear` removes it."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxrunner.cli import app
from jaxrunner.compile.cache_key import Key, environment
from jaxrunner.compile.executable_cache import ExecutableCache


def run(*args):
    return CliRunner().invoke(app, ["cache", *map(str, args)])


@pytest.fixture
def directory(tmp_path):
    """A usable entry, one of other sources, and a damaged one."""
    cache = ExecutableCache(tmp_path / "cache")
    compiled = jax.jit(jnp.tanh).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()
    cache.store(Key("usable", environment()), compiled, {})
    cache.store(Key("stale", environment() | {"source": "edited", "driver": "0"}), compiled, {})
    damaged = Key("damaged", {})
    cache.store(damaged, compiled, {})
    path = cache._path(damaged)
    path.write_bytes(path.read_bytes()[:-1])
    return cache.directory


def test_list_says_what_would_be_used_and_why_not(directory):
    result = run("list", "--directory", directory, "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["state"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert rows["usable"]["executable"] == "usable"
    assert rows["stale"]["note"] == "made for another source, driver"
    assert "damaged" in rows["bad"]["note"]
    text = run("list", "--directory", directory)
    assert [word in text.stdout for word in ("usable", "stale", "bad")] == [True] * 3
    assert f"3 entries, 0.0 MB, in {directory}" in text.stderr


def test_check_fails_while_an_entry_is_damaged(directory):
    result = run("check", "--directory", directory)
    assert result.exit_code == 1
    assert result.stdout.count("\n") == 1
    assert "2 of 3 entries are sound" in result.stderr
    assert run("clear", "--directory", directory, "--unusable").exit_code == 0
    assert run("check", "--directory", directory).exit_code == 0


def test_clear_removes_all_entries(directory):
    result = run("clear", "--directory", directory)
    assert "removed 3 entries" in result.stderr
    assert [path.name for path in directory.iterdir()] == ["secret"]


def test_no_cache_is_an_error(monkeypatch):
    monkeypatch.setenv("JAXRUNNER_COMPILATION_CACHE", "off")
    result = run("list")
    assert result.exit_code == 1
    assert "there is no cache to look at" in result.stderr
