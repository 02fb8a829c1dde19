"""Where Triton kernels may run, which GPU takes them by itself, and their bodies in Triton's interpreter."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxrunner.checks import attention_specs as specs
from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import attention_triton, implementation, triton_compat
from jaxrunner.pallas.implementation import best, choice_table, resolve

ROOT = Path(__file__).resolve().parents[2]


def version(package: str) -> tuple[int, ...]:
    """Of an installed package, (0,) without it."""
    try:
        return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return (0,)


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for choice in ("triton", {"attention": "triton"}):
        with pytest.raises(ImplementationError, match=r"needs triton and jax-triton.*jaxrunner\[triton\]"):
            resolve("attention", choice)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_machine_without_a_gpu_is_named_with_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ImplementationError, match=r"the backend is 'cpu'.*jaxrunner\[triton\]"):
        resolve("attention", "triton")


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(triton_compat, "unavailable_reason", lambda: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [type("Gpu", (), {"compute_capability": "7.5"})])
    with pytest.raises(ImplementationError, match=r"8\.0 or newer, this GPU has 7\.5"):
        resolve("attention", "triton")


def test_a_plain_name_applies_to_the_ops_which_have_it(monkeypatch):
    monkeypatch.setattr(implementation, "triton_refusal", lambda: None)
    assert resolve("attention", "triton") == "triton"
    for op in implementation.AVAILABLE.keys() - {"attention"}:
        assert resolve(op, "triton") == resolve(op, None)
        with pytest.raises(ImplementationError, match="has no implementation 'triton'"):
            resolve(op, {op: "triton"})


@pytest.mark.parametrize(
    ("capability", "triton", "reason", "choice"),
    [
        ("8.6", None, None, "triton"),
        ("10.0", None, None, "triton"),
        ("8.0", "not installed", None, "xla"),
        ("8.0", None, "float8", "xla"),
        ("7.5", "too old", None, "xla"),
        (None, None, None, "xla"),
    ],
)
def test_the_automatic_choice(monkeypatch, capability, triton, reason, choice):
    monkeypatch.setattr(implementation, "compute_capability", lambda: capability)
    monkeypatch.setattr(implementation, "triton_refusal", lambda: triton)
    assert best("attention", {"triton": reason}) == choice
    assert best("kv_write", {"triton": reason}) == "xla"


def test_hopper_never_takes_triton_by_itself(monkeypatch):
    monkeypatch.setattr(implementation, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(implementation, "triton_refusal", lambda: None)
    assert best("attention", {"mosaic": "float32"}) == "xla"
    monkeypatch.setattr(implementation, "mosaic_unavailable", lambda: None)
    assert best("attention") == "mosaic"


def test_the_table_of_choices_names_it():
    (row,) = (line for line in choice_table().splitlines() if "triton" in line)
    assert "8.0 or newer, not 9.0" in row
    assert "jaxrunner[triton]" in row


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q": "float32"}, "one type"),
        ({"blocks": "float8_e4m3fn"}, "one type"),
        ({"head_dim": 512}, "at most 256"),
        ({"soft_cap": 0.0}, "positive soft cap"),
        ({}, None),
    ],
)
def test_what_it_cannot_take(changes, reason):
    head_dim = changes.get("head_dim", 64)
    q = jax.ShapeDtypeStruct((4, 4, head_dim), changes.get("q", jnp.bfloat16))
    blocks = jax.ShapeDtypeStruct((1, 2, 4, 16, 2, head_dim), changes.get("blocks", jnp.bfloat16))
    found = attention_triton.reason_against(q, blocks, changes.get("soft_cap"))
    assert found is None if reason is None else reason in found


def test_the_split_of_a_decode():
    assert attention_triton.default_splits(8, 1000) == round(2 * triton_compat.num_cores() / 8)
    assert attention_triton.default_splits(8, 2) == 1  # a table of two tiles
    assert attention_triton.default_splits(4000, 1000) == 1
    assert attention_triton.default_splits(1, 1000) == attention_triton.MAX_SPLITS


@pytest.mark.skipif(version("triton") < (3, 9), reason="its interpreter needs triton 3.9 with NumPy 2.4")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("function", "only"), [("attention_triton", "decode"), ("attention_triton", "ragged"), ("_shares", "decode")]
)
def test_interpreted(function, only, dtype):
    """Not in bfloat16, whose products Triton's interpreter gets wrong. In a process of its own: Triton reads the
    variable when it is imported."""
    module = __name__ if function == "_shares" else "jaxrunner.pallas.attention_triton"
    command = ["-m", "jaxrunner", "check-attention", f"{module}:{function}", "--only", only, "--dtype", dtype, "--json"]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, [row for row in rows if not row["pass"]] or result.stderr
    assert len(rows) == sum(only in spec.name for spec in specs.SMALL)


def _shares(*args, **options):
    """More shares than some requests have tiles of keys."""
    return attention_triton.attention_triton(*args, **options, num_splits=3)
