"""Ops over a float8 cache with scales: attention against the float64 oracle, writes exact."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrunner import Bucket, init_state, step
from jaxrunner.checks import attention_specs as specs
from jaxrunner.checks.attention_judge import metadata_of, run
from jaxrunner.errors import ImplementationError, NotBuiltError
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import abstract_weights
from jaxrunner.pallas import compat
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.kv_write import kv_write
from jaxrunner.pallas.rope_kv_write import rope_kv_write
from jaxrunner.stages.inputs import step_layout
from tests.oracle import attention as oracle
from tests.pallas.test_attention import check, mosaic
from tests.pallas.test_rope_kv_write import SHAPES
from tests.pallas.test_rope_kv_write import arguments as plain_rope_arguments

FLOAT8 = ml_dtypes.float8_e4m3fn
UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
every_spec = pytest.mark.parametrize("spec", specs.FLOAT8, ids=str)


@every_spec
@pytest.mark.parametrize("dtype", ["float32", None])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_attention(spec, dtype, implementation):
    spec = specs.dataclasses.replace(spec, dtype=dtype or spec.dtype)
    arrays = spec.build()
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation=implementation)))


def test_without_scales_they_are_ones():
    spec = specs.dataclasses.replace(specs.FLOAT8[0], kv_scales=(1.0, 1.0), num_layers=1, layer=0)
    arrays = spec.build()
    assert (arrays["kv_scales"] == 1).all()
    result = run(spec, arrays | {"kv_scales": None}, attention)
    np.testing.assert_array_equal(result, run(spec, arrays, attention))


def test_scales_of_another_cache_are_refused():
    args = [jnp.asarray(x) for x in arguments((1, 64), 3)]
    scales, args[0] = jnp.ones((3, 2)), args[0].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match=r"float8 cache .*, not for one of bfloat16"):
        kv_write(*args, kv_scales=scales)


# Writes.

HEADS = [(2, 64), (3, 64), (1, 256), (4, 80), (8, 128), (4, 96)]
SCALES = np.array([[1.0, 1.0], [0.25, 3.0], [1.0, 1.0]], np.float32)


def arguments(heads, tokens: int, dtype=ml_dtypes.bfloat16):
    """(blocks, layer, k, v, slot_mapping): values far beyond float8's range, infinities among them, masked slots."""
    rng = np.random.default_rng(tokens)
    num_blocks = 2 + -(-tokens // 16)
    blocks = rng.integers(0, 256, (3, 2, num_blocks, 16, *heads), np.uint8)
    k, v = rng.standard_normal((2, tokens, *heads)) * 10 ** rng.uniform(-3, 6, (2, tokens, *heads))
    k[0, 0, :2] = np.inf, -np.inf
    slots = rng.permutation(num_blocks * 16)[:tokens].astype(np.int32)
    slots[1::4] = -1
    return blocks, np.int32(1), k.astype(dtype), v.astype(dtype), slots


def stored(rows, scale: np.float32) -> np.ndarray:
    """What vLLM's meaning of a scale says, as bytes: value / scale, saturated."""
    scaled = np.asarray(rows, np.float32) * (np.float32(1) / scale)
    return np.clip(scaled, -448, 448).astype(FLOAT8).view(np.uint8)


def check_write(args, result) -> None:
    blocks, layer, k, v, slots = args
    k8, v8 = stored(k, SCALES[layer, 0]), stored(v, SCALES[layer, 1])
    expected = oracle.kv_write(blocks, layer, k8, v8, slots)
    np.testing.assert_array_equal(np.asarray(result), expected)
    live = slots >= 0
    written = np.asarray(result)[layer, :, slots[live] // 16, slots[live] % 16]
    assert np.isfinite(written.view(FLOAT8).astype(np.float32)).all()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_written_values_saturate_and_the_rest_keeps_its_bits(heads, dtype):
    args = arguments(heads, 21, dtype)
    f = jax.jit(functools.partial(kv_write, implementation="xla"))
    check_write(args, f(*map(jnp.asarray, args), kv_scales=jnp.asarray(SCALES)))


def test_the_cache_is_neither_copied_nor_widened():
    """XLA has no gather and scatter of float8: nothing of the cache's size but the updated cache is in the program."""
    spec = specs.FLOAT8[0]
    arrays = spec.build()
    blocks = jnp.zeros((2, 2, 4000, 16, 1, 64), jnp.uint8)
    k = jnp.zeros((4, 1, 64))
    metadata = metadata_of(spec, arrays)

    def f(blocks, q, k):
        blocks = kv_write(blocks, jnp.int32(1), k, k, jnp.arange(4, dtype=jnp.int32), implementation="xla")
        return attention(q, blocks, jnp.int32(1), metadata, **spec.options, implementation="xla"), blocks

    compiled = jax.jit(f, donate_argnums=0).lower(blocks, jnp.asarray(arrays["q"]), k).compile()
    analysis = compiled.memory_analysis()
    assert analysis.temp_size_in_bytes < blocks.nbytes / 10
    assert analysis.alias_size_in_bytes >= blocks.nbytes
    sized = re.findall(r"= (\w+)\[2,2,4000,16,1,64\]\S* ([\w-]+)\(", compiled.as_text())
    assert {dtype for dtype, _ in sized} == {"u8"}
    assert {op for _, op in sized} <= {"parameter", "scatter", "get-tuple-element", "fusion", "call", "bitcast"}


def test_no_gradient_passes_the_cache():
    args = [jnp.asarray(x) for x in arguments((1, 64), 3, np.float32)]
    with pytest.raises(NotBuiltError, match="no gradient passes a float8 cache"):
        jax.grad(lambda k: kv_write(args[0], args[1], k, *args[3:]).astype(jnp.float32).sum())(args[2])


every_shape = pytest.mark.parametrize(("shape", "norm"), [(s, i % 2 == 0) for i, s in enumerate(SHAPES)])


def rope_arguments(shape, tokens: int, norm: bool, dtype=ml_dtypes.bfloat16):
    """(positional arguments, named arguments) of `rope_kv_write`; the values are beyond float8's range in places."""
    (qkv, blocks, *rest), norms = plain_rope_arguments(shape, tokens, norm=norm, rope=True, dtype=dtype)
    blocks = np.random.default_rng(tokens).integers(0, 256, (3, *blocks.shape[1:]), np.uint8)
    named = {name: (weight.astype(np.float32) * 200).astype(dtype) for name, weight in norms.items()}
    return ((qkv.astype(np.float32) * 90).astype(dtype), blocks, *rest), named | {"kv_scales": SCALES}


def check_rope(args, named, result) -> None:
    """Queries as over any cache; keys within a step of float8 of the exact ones; values and the rest exact."""
    qkv, blocks, layer, slots, _ = args
    q_result, cache = (np.asarray(x) for x in result)
    kv_heads = blocks.shape[4]
    heads = qkv.shape[1] - 2 * kv_heads
    plain = {name: value for name, value in named.items() if name != "kv_scales"}
    wide = np.zeros(blocks.shape, qkv.dtype)
    expected_q, wide = jax.jit(functools.partial(rope_kv_write, implementation="xla", eps=1e-5))(
        jnp.asarray(qkv), jnp.asarray(wide), *jax.tree.map(jnp.asarray, args[2:]), **plain
    )
    scale = np.abs(np.asarray(expected_q, np.float32)).max(axis=-1, keepdims=True)
    assert (np.abs(q_result.astype(np.float32) - np.asarray(expected_q, np.float32)) <= 1e-2 * scale).all()
    live = np.flatnonzero(slots >= 0)
    block, offset = slots[live] // 16, slots[live] % 16
    want = np.asarray(wide)[layer, 0, block, offset].astype(np.float64) / SCALES[layer, 0]
    got = cache[layer, 0, block, offset].view(FLOAT8).astype(np.float64)
    assert np.isfinite(got).all()
    rounding = 0.07 * np.abs(want) + 1e-2 * np.abs(want).max(axis=-1, keepdims=True)  # of float8, of the model's type
    assert (np.abs(got - np.clip(want, -448, 448)) <= rounding).all()
    v8 = stored(qkv[:, heads + kv_heads :], SCALES[layer, 1])
    written = oracle.kv_write(blocks, layer, np.zeros_like(v8), v8, slots)
    np.testing.assert_array_equal(cache[:, 1], written[:, 1])
    untouched = np.array(cache)
    untouched[layer, 0, block, offset] = 0
    np.testing.assert_array_equal(untouched[:, 0], written[:, 0])


def run_rope(args, named, f) -> tuple:
    return jax.block_until_ready(jax.jit(f)(*jax.tree.map(jnp.asarray, args), **jax.tree.map(jnp.asarray, named)))


@every_shape
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_rope_kv_write(shape, norm, dtype):
    args, named = rope_arguments(shape, 13, norm, dtype)
    check_rope(args, named, run_rope(args, named, functools.partial(rope_kv_write, eps=1e-5, implementation="xla")))


@needs_mosaic
@pytest.mark.parametrize("spec", [s for s in specs.FLOAT8 if s.interpret], ids=str)
def test_attention_interpreted(spec):
    """Decodes by shares of the keys too, which a second kernel combines."""
    arrays = spec.build(seed=1)
    with compat.interpreting():
        result = run(spec, arrays, mosaic(spec, None if spec.query_len is None else 2))
    check(spec, arrays, result)


@needs_mosaic
@pytest.mark.parametrize("query_len", [1, None])
def test_attention_has_no_races(query_len):
    make = specs.decode if query_len else specs.ragged
    lens = (200,) if query_len else ((5, 300),)
    spec = make("races", lens, num_heads=2, num_kv_heads=1, **specs.FP8)
    arrays = spec.build()
    with compat.interpreting(detect_races=True):
        result = run(spec, arrays, functools.partial(attention, implementation="mosaic"))
    check(spec, arrays, result)


@needs_mosaic
@pytest.mark.parametrize("heads", [(2, 64), (3, 64), (4, 80)])
def test_kv_write_interpreted(heads):
    args = arguments(heads, 6)
    with compat.interpreting():
        f = jax.jit(functools.partial(kv_write, implementation="mosaic"))
        result = jax.block_until_ready(f(*map(jnp.asarray, args), kv_scales=jnp.asarray(SCALES)))
    check_write(args, result)


@needs_mosaic
@pytest.mark.parametrize(("shape", "norm"), [(SHAPES[0], True), (SHAPES[1], False)])
def test_rope_kv_write_interpreted(shape, norm):
    args, named = rope_arguments(shape, 3, norm)
    with compat.interpreting():
        result = run_rope(args, named, functools.partial(rope_kv_write, eps=1e-5, implementation="mosaic"))
    check_rope(args, named, result)


MODELS = {
    "Llama-3-8B": (32, 8, 128),
    "Qwen2-7B": (28, 4, 128),
    "SmolLM2-135M": (9, 3, 64),
    "Gemma-2-2B": (8, 4, 256),
    "Phi-3-mini": (32, 32, 96),
}
every_model = pytest.mark.parametrize("model", MODELS)


def abstract(model: str, tokens: int):
    """(qkv, cache of more than 2^31 elements, layer, slots, rope, scales) of a model, as shapes."""
    heads, kv_heads, head_dim = MODELS[model]
    f32, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.float32, jnp.int32))
    num_blocks = 2**32 // (32 * 2 * 16 * kv_heads * head_dim)
    cache = jax.ShapeDtypeStruct((32, 2, num_blocks, 16, kv_heads, head_dim), jnp.uint8)
    qkv = jax.ShapeDtypeStruct((tokens, heads + 2 * kv_heads, head_dim), jnp.bfloat16)
    return qkv, cache, i32(()), i32((tokens,)), (f32((tokens, head_dim // 2)),) * 2, f32((32, 2))


def assert_in_place(text: str) -> None:
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "output_operand_alias" in text
    assert "stablehlo.scatter" not in text


@needs_mosaic
@every_model
@pytest.mark.parametrize("tokens", [64, 8192])
def test_writes_lower_to_one_kernel_in_place(model, tokens):
    qkv, cache, layer, slots, rope, scales = abstract(model, tokens)
    rows = jax.ShapeDtypeStruct((tokens, *cache.shape[4:]), jnp.bfloat16)

    def write(blocks, layer, k, v, slots, scales):
        return kv_write(blocks, layer, k, v, slots, kv_scales=scales, implementation="mosaic")

    assert_in_place(compat.lower_for_cuda(write, cache, layer, rows, rows, slots, scales).as_text())

    def rotate(qkv, blocks, layer, slots, rope, scales):
        return rope_kv_write(qkv, blocks, layer, slots, rope, kv_scales=scales, implementation="mosaic")

    assert_in_place(compat.lower_for_cuda(rotate, qkv, cache, layer, slots, rope, scales).as_text())


OPTIONS = {"Gemma-2-2B": {"soft_cap": 50.0, "window": 4096}, "SmolLM2-135M": {"sinks": True}}


@needs_mosaic
@every_model
@pytest.mark.parametrize("query_len", [1, 4, None])
def test_attention_lowers_to_a_kernel_that_reads_the_cache_in_place(model, query_len):
    heads, _, head_dim = MODELS[model]
    options = {"scale": head_dim**-0.5, **OPTIONS.get(model, {})}
    tokens = 16 * query_len if query_len else 512
    _, cache, layer, _, _, scales = abstract(model, tokens)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((17,), (16,), (), (16, 512), (tokens,))]
    sinks = jax.ShapeDtypeStruct((heads,), jnp.float32) if options.pop("sinks", False) else None
    q = jax.ShapeDtypeStruct((tokens, heads, head_dim), jnp.bfloat16)

    def f(q, blocks, layer, metadata, scales, sinks):
        metadata = AttentionMetadata(*metadata, query_len=query_len)
        options_of_call = {**options, "sinks": sinks, "kv_scales": scales, "implementation": "mosaic"}
        return attention(q, blocks, layer, metadata, **options_of_call)

    text = compat.lower_for_cuda(f, q, cache, layer, ints, scales, sinks).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "dynamic_gather" not in text
    shape = "x".join(map(str, cache.shape))
    assert f"-> tensor<{shape}x" not in text


@needs_mosaic
@pytest.mark.parametrize(
    ("bucket", "kernels"),
    [(Bucket("decode", 256, 256), ["attention_decode"]), (Bucket("mixed", 64, 5, 64), [])],
    ids=str,
)
def test_a_step_lowers_with_kernels_that_write_and_read_the_cache(bucket, kernels):
    """Through the model and the state: two kernels a layer, none of XLA's writes, the scales an operand."""
    layers = (LayerSpec(), LayerSpec())
    sizes = {"max_position_embeddings": 512, "dtype": "bfloat16"}
    model = Model("LlamaForCausalLM", 512, 256, 512, 8, 8, 128, layers, **sizes)
    state = jax.eval_shape(
        lambda: init_state(model, max_requests=256, max_model_len=256, num_blocks=640, kv_cache_dtype="fp8")
    )
    upload = jax.ShapeDtypeStruct((step_layout(bucket, state.tables.groups, 0).size,), jnp.int32)
    f = functools.partial(step, model, bucket=bucket, implementation="mosaic")
    text = compat.lower_for_cuda(f, abstract_weights(model), state, upload).as_text()
    shape = "x".join(map(str, state.kv.blocks[0].shape))
    assert not [line for line in text.splitlines() if "scatter" in line and f"{shape}xui8" in line]
    for name in ("rope_kv_write", *(kernels or ["attention_prefill"])):
        assert name in text


@needs_mosaic
def test_a_head_that_no_swizzle_fits_is_refused_by_name_and_left_to_xla():
    spec = next(s for s in specs.FLOAT8 if s.head_dim == 80)
    arrays = spec.build()
    reason = "over float8 it needs a head size that is a multiple of 32, not 80"
    with pytest.raises(ImplementationError, match=reason), compat.interpreting():
        run(spec, arrays, functools.partial(attention, implementation="mosaic"))
    check(spec, arrays, run(spec, arrays, attention))


ON_MOSAIC = [s for s in specs.FLOAT8 if s.head_dim % 32 == 0]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", ON_MOSAIC, ids=str)
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_attention_on_the_gpu(spec, splits):
    arrays = spec.build(seed=2)
    check(spec, arrays, run(spec, arrays, mosaic(spec, splits)))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_attention_on_the_gpu_on_random_batches(seed):
    spec = specs.dataclasses.replace(specs.random_spec(seed), **specs.FP8)
    arrays = spec.build(seed)
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation="mosaic")))


@pytest.mark.gpu
@every_spec
def test_xla_attention_on_the_gpu(spec):
    arrays = spec.build(seed=3)
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation="xla")))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [1, 70, 3000])
@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_kv_write_on_the_gpu(heads, tokens, implementation):
    args = arguments(heads, tokens)
    blocks = jnp.asarray(args[0])
    pointer = blocks.unsafe_buffer_pointer()
    f = jax.jit(functools.partial(kv_write, implementation=implementation), donate_argnums=0)
    result = f(blocks, *map(jnp.asarray, args[1:]), kv_scales=jnp.asarray(SCALES))
    check_write(args, result)
    assert result.unsafe_buffer_pointer() == pointer


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("tokens", [70, 700])
def test_rope_kv_write_on_the_gpu(shape, norm, tokens):
    args, named = rope_arguments(shape, tokens, norm)
    check_rope(args, named, run_rope(args, named, functools.partial(rope_kv_write, eps=1e-5, implementation="mosaic")))


def test_the_automatic_choice_over_float8_is_the_kernels(monkeypatch):
    from jaxrunner.pallas import attention_mosaic, implementation, kv_write_mosaic

    monkeypatch.setattr(implementation, "compute_capability", lambda: "9.0")
    monkeypatch.setattr(implementation, "mosaic_unavailable", lambda: None)
    blocks = jnp.zeros((2, 2, 8, 16, 8, 128), jnp.uint8)
    q = jnp.zeros((8, 32, 128), jnp.bfloat16)
    assert implementation.resolve("kv_write", None, {"mosaic": kv_write_mosaic.reason_against(blocks)}) == "mosaic"
    reason = attention_mosaic.reason_against(q, blocks, 1.0, None)
    assert implementation.resolve("attention", None, {"mosaic": reason}) == "mosaic"
