"""`rope_kv_write`: every implementation against the float64 oracle; the values written are exact."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.rope_kv_write import rope_kv_write
from tests.oracle import attention as oracle

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
SHAPES = [(4, 2, 64), (9, 3, 64), (4, 1, 128), (2, 2, 80), (3, 3, 96), (8, 4, 256)]
"""Heads, KV heads, head size."""
MODELS = {
    "Llama-3-8B": (32, 8, 128),
    "Qwen2-7B": (28, 4, 128),
    "SmolLM2-135M": (9, 3, 64),
    "Gemma-2-2B": (8, 4, 256),
    "Phi-3-mini": (32, 32, 96),
    "head 80": (32, 32, 80),
}
EPS = 1e-5


def arguments(shape, tokens: int, *, norm: bool, rope: bool, dtype=ml_dtypes.bfloat16):
    """(positional arguments, named arguments) of `rope_kv_write`."""
    heads, kv_heads, head_dim = shape
    rng = np.random.default_rng(tokens)
    num_blocks = 2 + -(-tokens // 16)
    qkv = rng.standard_normal((tokens, heads + 2 * kv_heads, head_dim)).astype(dtype)
    blocks = rng.standard_normal((2, 2, num_blocks, 16, kv_heads, head_dim)).astype(dtype)
    slots = rng.permutation(num_blocks * 16)[:tokens].astype(np.int32)
    slots[1::4] = -1
    angles = (rng.standard_normal((tokens, head_dim // 2)) * 100).astype(np.float32)
    named = {}
    if norm:
        named |= {name: rng.standard_normal(head_dim).astype(dtype) for name in ("q_norm", "k_norm")}
    return (qkv, blocks, np.int32(1), slots, (np.cos(angles), np.sin(angles)) if rope else None), named


def check(args, named, result) -> None:
    qkv, blocks, layer, slots, rope = args
    q_result, cache = (np.asarray(x) for x in result)
    kv_heads = blocks.shape[4]
    heads = qkv.shape[1] - 2 * kv_heads
    expected = [np.asarray(qkv[:, a:b], np.float64) for a, b in ((0, heads), (heads, heads + kv_heads))]
    if "q_norm" in named:
        expected = [oracle.rms_norm(x, named[n], EPS) for x, n in zip(expected, ("q_norm", "k_norm"), strict=True)]
    if rope is not None:
        expected = [oracle.rope(x, *rope) for x in expected]
    tolerance = 1e-5 if blocks.dtype == np.float32 else 1.5e-2  # of rounding twice to bfloat16, relative to a head
    q, k = expected

    def close(got, want):
        scale = np.abs(want).max(axis=-1, keepdims=True)
        assert (np.abs(got.astype(np.float64) - want) <= tolerance * scale).all()

    close(q_result, q)
    live = np.flatnonzero(slots >= 0)
    block, offset = slots[live] // 16, slots[live] % 16
    close(cache[layer, 0, block, offset], k[live])
    written = oracle.kv_write(blocks, layer, np.zeros_like(blocks, shape=k.shape), qkv[:, heads + kv_heads :], slots)
    np.testing.assert_array_equal(cache[:, 1], written[:, 1])
    untouched = np.array(cache)
    untouched[layer, 0, block, offset] = 0
    np.testing.assert_array_equal(untouched[:, 0], written[:, 0])


every_option = pytest.mark.parametrize(("norm", "rope"), [(False, True), (True, True), (True, False), (False, False)])


@every_option
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_xla(shape, norm, rope, dtype):
    args, named = arguments(shape, 13, norm=norm, rope=rope, dtype=dtype)
    f = jax.jit(functools.partial(rope_kv_write, eps=EPS, implementation="xla"))
    check(args, named, f(*jax.tree.map(jnp.asarray, args), **jax.tree.map(jnp.asarray, named)))


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "norm", "rope", "whole"),
    [(SHAPES[0], True, True, False), (SHAPES[1], False, True, True), (SHAPES[3], True, False, True)],
)
def test_mosaic_interpreted(shape, norm, rope, whole):
    from jaxrunner.pallas.rope_kv_write_mosaic import rope_kv_write_mosaic

    args, named = arguments(shape, 3, norm=norm, rope=rope)
    f = jax.jit(functools.partial(rope_kv_write_mosaic, whole_tokens=whole, eps=EPS))
    with compat.interpreting():
        result = jax.block_until_ready(f(*jax.tree.map(jnp.asarray, args), **jax.tree.map(jnp.asarray, named)))
    check(args, named, result)


@needs_mosaic
def test_mosaic_by_name_has_no_races():
    args, _ = arguments((2, 1, 64), 2, norm=False, rope=True)
    f = jax.jit(functools.partial(rope_kv_write, implementation="mosaic", eps=EPS))
    with compat.interpreting(detect_races=True):
        result = jax.block_until_ready(f(*jax.tree.map(jnp.asarray, args)))
    check(args, {}, result)


@needs_mosaic
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tokens", "norm"), [(64, False), (8192, True)])
def test_mosaic_lowers_to_one_kernel_in_place(model, tokens, norm):
    heads, kv_heads, head_dim = MODELS[model]

    def bf16(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    num_blocks = 2**32 // (32 * 2 * 16 * kv_heads * head_dim)
    table = jax.ShapeDtypeStruct((tokens, head_dim // 2), jnp.float32)
    args = [
        bf16(tokens, heads + 2 * kv_heads, head_dim),
        bf16(32, 2, num_blocks, 16, kv_heads, head_dim),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        (table, table),
    ]
    named = {"q_norm": bf16(head_dim), "k_norm": bf16(head_dim)} if norm else {}
    f = functools.partial(rope_kv_write, implementation="mosaic")
    text = compat.lower_for_cuda(lambda args, named: f(*args, **named), args, named).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "output_operand_alias" in text
    assert "stablehlo.slice" not in text
    assert "stablehlo.scatter" not in text


@pytest.mark.gpu
@every_option
@pytest.mark.parametrize("shape", [*SHAPES, *MODELS.values()])
@pytest.mark.parametrize("tokens", [70, 700])
def test_mosaic_on_the_gpu(shape, norm, rope, tokens):
    args, named = arguments(shape, tokens, norm=norm, rope=rope)
    f = jax.jit(functools.partial(rope_kv_write, eps=EPS, implementation="mosaic"))
    check(args, named, f(*jax.tree.map(jnp.asarray, args), **jax.tree.map(jnp.asarray, named)))


@needs_mosaic
def test_mosaic_refuses_what_it_cannot_take():
    args, named = arguments(SHAPES[0], 3, norm=False, rope=True, dtype=np.float32)
    args = jax.tree.map(jnp.asarray, args)
    with pytest.raises(ImplementationError, match="bfloat16 or float16"), compat.interpreting():
        rope_kv_write(*args, implementation="mosaic")
    check(args, named, rope_kv_write(*args, eps=EPS))


def test_one_norm_alone_is_an_error():
    args, _ = arguments(SHAPES[0], 3, norm=False, rope=True)
    with pytest.raises(ValueError, match="go together"):
        rope_kv_write(*jax.tree.map(jnp.asarray, args), q_norm=jnp.ones(64, jnp.bfloat16))
