"""The command line's compilation cache: where it goes, when it is left alone, and that it is found again."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from jaxrunner.compile.persistent import ENVIRONMENT, use_compilation_cache

PROGRAM = """
import sys, jax, jax.numpy as jnp
from jaxrunner.compile.persistent import use_compilation_cache
print(use_compilation_cache(sys.argv[1]))
x = jnp.ones((64, 64))
jax.jit(lambda x: jnp.tanh(x) @ x)(x).block_until_ready()
print(len(__import__("os").listdir(sys.argv[1])))
"""


@pytest.fixture(autouse=True)
def restored_configuration():
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_and_found_again(tmp_path):
    environment = {**os.environ, ENVIRONMENT: ""}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "xla")]
    entries = [int(subprocess.check_output(command, env=environment, text=True).split()[-1]) for _ in range(2)]
    assert entries[0] > 0
    assert entries[0] == entries[1]
    assert (tmp_path / "xla").stat().st_mode & 0o077 == 0


def test_off_and_a_cache_of_the_users_own_are_respected(monkeypatch, tmp_path):
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert use_compilation_cache() is None
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "theirs")


def test_a_directory_that_cannot_be_made_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache(tmp_path / "file" / "xla") is None
    assert "no compilation cache" in caplog.text
    assert jax.config.jax_compilation_cache_dir is None
