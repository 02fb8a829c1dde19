"""Attention by Triton: refused by name where it cannot run, and judged on a GPU by the specs that all share."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import DeviceRunner
from jaxrunner.checks import attention_specs as specs
from jaxrunner.checks.attention_oracle import attention as attention_oracle
from jaxrunner.compile.hlo import implementations
from jaxrunner.errors import ImplementationError
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_triton import attention_triton
from tests.conftest import GOLDEN, load_tiny
from tests.pallas.test_attention import check, run
from tests.runner.plans import CONFIG, LADDER, new, plan
from tests.runner.plans import run as run_plan

triton_attention = functools.partial(attention, implementation="triton")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="it runs there")
def test_without_a_gpu_it_is_refused_and_names_the_extra():
    spec = specs.SMALL[0]
    with pytest.raises(ImplementationError, match=r"triton.*jaxrunner\[triton\]"):
        run(spec, spec.build(), triton_attention)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", specs.SMALL, ids=str)
def test_triton_on_the_gpu(spec):
    pytest.importorskip("jax_triton")
    arrays = spec.build(seed=3)
    check(spec, arrays, run(spec, arrays, triton_attention))


@pytest.mark.gpu
@pytest.mark.parametrize("spec", specs.SMALL, ids=str)
def test_triton_in_float32_on_the_gpu(spec):
    """Decodes also with more shares than some requests have tiles of keys."""
    pytest.importorskip("jax_triton")
    spec = dataclasses.replace(spec, dtype="float32")
    arrays = spec.build(seed=4)
    more = {} if spec.query_len is None else {"num_splits": 3}
    check(spec, arrays, run(spec, arrays, functools.partial(attention_triton, **more)))


@pytest.mark.gpu
@pytest.mark.parametrize("query_len", [1, None])
def test_a_cache_of_more_than_2_31_elements(query_len):
    """The last layer's last blocks; everything else is NaN."""
    pytest.importorskip("jax_triton")
    length, num_blocks, shape = 200, 42000, (16, 8, 128)
    keys = jax.random.split(jax.random.key(0), 2)
    ids = num_blocks - 1 - np.arange(13) * 7
    pages = jax.random.normal(keys[0], (2, 13, *shape), jnp.bfloat16)
    blocks = jnp.full((2, 2, num_blocks, *shape), jnp.nan, jnp.bfloat16).at[1, :, ids].set(pages.swapaxes(0, 1))
    assert blocks.size > 2**31
    tokens = query_len or 70
    q = jax.random.normal(keys[1], (tokens, 32, 128), jnp.bfloat16)
    table = np.zeros((1, 128), np.int32)
    table[0, :13] = ids
    arrays = (np.array([0, tokens]), np.array([length]), np.array(1), table, np.full(tokens, -1))
    metadata = AttentionMetadata(*(jnp.asarray(a, jnp.int32) for a in arrays), query_len=query_len)
    f = jax.jit(functools.partial(attention_triton, scale=128**-0.5))
    result = np.asarray(f(q, blocks, jnp.int32(1), metadata)).astype(np.float64)
    small = np.asarray(pages).astype(np.float64)[None]
    expected = attention_oracle(np.asarray(q), small, 0, np.arange(13)[None], [length], [tokens], scale=128**-0.5)
    assert np.linalg.norm(result - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_triton_on_the_gpu_on_random_batches(seed):
    pytest.importorskip("jax_triton")
    spec = specs.random_spec(seed)
    arrays = spec.build(seed)
    check(spec, arrays, run(spec, arrays, triton_attention))


@pytest.mark.gpu
def test_an_engine_of_triton_gives_the_golden_tokens():
    pytest.importorskip("jax_triton")
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    model, weights = load_tiny("llama")
    config = CONFIG.__class__(**{**CONFIG.__dict__, "implementation": {"attention": "triton"}})
    runner = DeviceRunner(model, weights, config, ladder=LADDER)
    prompt, greedy = data["input_ids_1"].reshape(-1).tolist(), data["greedy_1"].tolist()
    tokens = run_plan(runner, plan({"a": len(prompt)}, [new("a", prompt, list(range(1, 12)))]))["a"]
    while len(tokens) < len(greedy):
        tokens += run_plan(runner, plan({"a": 1}))["a"]
    assert tokens == greedy
    texts = [e.compiled.as_text() for e in runner.table.entries.values() if e.program.bucket is not None]
    assert {implementations(text)["attention"] for text in texts} == {"triton"}
