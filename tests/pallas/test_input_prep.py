"""`input_prep`: every implementation against literal numbers and the NumPy oracle, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.input_prep import InputPrep, input_prep
from tests.oracle import input_prep as oracle
from tests.pallas import specs

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
every_spec = pytest.mark.parametrize("spec", specs.INPUT_PREP, ids=str)


def run_xla(spec: specs.InputPrepSpec, args) -> InputPrep:
    return jax.jit(functools.partial(input_prep, implementation="xla", **spec.static))(*args)


def mosaic(spec: specs.InputPrepSpec, tokens_per_cta: int | None):
    from jaxrunner.pallas.input_prep_mosaic import input_prep_mosaic

    return jax.jit(functools.partial(input_prep_mosaic, tokens_per_cta=tokens_per_cta, **spec.static))


def device_args(spec: specs.InputPrepSpec, seed: int = 0):
    args, numbers = spec.build(seed)
    return jax.tree.map(jnp.asarray, args), numbers


def assert_equal(actual: InputPrep, expected: dict) -> None:
    """Bit-equal to the oracle in every entry, padding included."""
    for name, value in expected.items():
        got = getattr(actual, name)
        for g, (a, b) in enumerate(zip(got, value, strict=True) if isinstance(value, list) else [(got, value)]):
            assert a.dtype == np.int32
            np.testing.assert_array_equal(np.asarray(a), b, err_msg=f"{name}, group {g}")


@every_spec
def test_the_oracle_gives_the_literal_numbers(spec):
    _, numbers = spec.build()
    result = oracle.input_prep(**numbers)
    for name, expected in spec.expected.items():
        got = result[name][0] if isinstance(result[name], list) else result[name]
        np.testing.assert_array_equal(got[: len(expected)], expected, err_msg=name)


@every_spec
def test_xla(spec):
    args, numbers = device_args(spec)
    assert_equal(run_xla(spec, args), oracle.input_prep(**numbers))


@pytest.mark.parametrize("seed", range(8))
def test_xla_on_random_batches(seed):
    spec = random_spec(seed)
    args, numbers = device_args(spec, seed)
    assert_equal(run_xla(spec, args), oracle.input_prep(**numbers))


@needs_mosaic
@pytest.mark.parametrize("spec", [s for s in specs.INPUT_PREP if s.interpret], ids=str)
def test_mosaic_interpreted(spec):
    args, numbers = device_args(spec)
    with compat.interpreting():
        result = jax.block_until_ready(mosaic(spec, spec.tokens_per_cta)(*args))
    assert_equal(result, oracle.input_prep(**numbers))


@needs_mosaic
def test_mosaic_by_name_has_no_races():
    """The public function picks the kernel, and no two CTAs write the same word."""
    args, numbers = device_args(specs.WORKED_EXAMPLE)
    with compat.interpreting(detect_races=True):
        f = jax.jit(functools.partial(input_prep, implementation="mosaic", **specs.WORKED_EXAMPLE.static))
        result = jax.block_until_ready(f(*args))
    assert_equal(result, oracle.input_prep(**numbers))


@needs_mosaic
@pytest.mark.parametrize("num_tokens", [256, 8192])
@pytest.mark.parametrize("drafts", [0, 2])
def test_mosaic_lowers_to_one_kernel(num_tokens, drafts):
    """At a server's sizes: one custom call, and around it nothing that would become another kernel."""
    shapes = dataclasses.replace(
        specs.decode(256), num_tokens=num_tokens, num_draft_tokens=drafts, block_sizes=(16, 32), widths=(512, 2176)
    )
    args, _ = shapes.build()
    avals = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    text = compat.lower_for_cuda(mosaic(shapes, None), *avals).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert set(re.findall(r"= (stablehlo\.\w+)", text)) <= {"stablehlo.custom_call", "stablehlo.reshape"}


@pytest.mark.gpu
@every_spec
@pytest.mark.parametrize("tokens_per_cta", [None, 32])
def test_mosaic_on_the_gpu(spec, tokens_per_cta):
    args, numbers = device_args(spec, seed=1)
    result = mosaic(spec, tokens_per_cta)(*args)
    assert_equal(result, oracle.input_prep(**numbers))
    jax.tree.map(np.testing.assert_array_equal, result, run_xla(spec, args))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_mosaic_on_the_gpu_on_random_batches(seed):
    spec = random_spec(seed)
    args, numbers = device_args(spec, seed)
    assert_equal(mosaic(spec, (None, 2, 16, 64)[seed % 4])(*args), oracle.input_prep(**numbers))


@every_spec
def test_garbage_in_padding_changes_nothing(spec):
    clean, dirty = (run_xla(s, device_args(s)[0]) for s in (dataclasses.replace(spec, poison=p) for p in (False, True)))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_mosaic_is_refused_by_name_with_the_reason():
    if UNAVAILABLE is None and jax.default_backend() == "gpu":
        pytest.skip("it runs here")
    args, _ = device_args(specs.WORKED_EXAMPLE)
    reason = r"needs jax 0\.11" if UNAVAILABLE else "the backend is 'cpu'"
    with pytest.raises(ImplementationError, match=reason):
        input_prep(*args, implementation="mosaic", **specs.WORKED_EXAMPLE.static)


@needs_mosaic
def test_mosaic_refuses_narrow_tables():
    spec = dataclasses.replace(specs.WORKED_EXAMPLE, widths=(64,))
    with pytest.raises(ImplementationError, match="multiple of 128 columns"):
        mosaic(spec, None)(*device_args(spec)[0])


def random_spec(seed: int) -> specs.InputPrepSpec:
    """Prefill chunks, decodes with drafts, empty rows and padding in one batch of two groups."""
    rng = np.random.default_rng(seed)
    live, max_len, num_drafts = int(rng.integers(0, 40)), 2048, int(rng.integers(0, 4))
    query_lens, computed, prefill_len, drafts = [], [], [], []
    for _ in range(live):
        kind = rng.choice(["empty", "short", "long", "decode"], p=[0.15, 0.25, 0.15, 0.45])
        scheduled = int(rng.integers(0, num_drafts + 1)) if kind == "decode" else 0
        length = {"empty": 0, "short": rng.integers(1, 40), "long": rng.integers(40, 600)}.get(kind, 1 + scheduled)
        before = int(rng.integers(1, max_len - length))
        query_lens.append(int(length))
        computed.append(before)
        prefill_len.append(int(rng.integers(1, before + 1) if kind == "decode" else before + length))
        drafts.append(scheduled)
    return specs.InputPrepSpec(
        f"random {seed}",
        tuple(query_lens),
        tuple(computed),
        prefill_len=tuple(prefill_len),
        num_drafts=tuple(drafts),
        num_draft_tokens=num_drafts,
        batch=max(live, 1) + int(rng.integers(0, 20)),
        num_tokens=max(sum(query_lens), 1) + int(rng.integers(0, 300)),
        rows=64,
        max_len=max_len,
        block_sizes=(16, int(rng.choice([3, 4, 32]))),
        widths=(256, 768),
        poison=True,
    )
