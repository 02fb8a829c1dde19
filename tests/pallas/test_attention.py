"""`attention`: every implementation against the float64 oracle, and what the kernels promise about lowering."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.checks import attention_specs as specs
from jaxrunner.checks.attention_judge import compare, run
from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
every_spec = pytest.mark.parametrize("spec", specs.SMALL, ids=str)


def check(spec: specs.AttentionSpec, arrays, result: np.ndarray) -> None:
    verdict = compare(spec, arrays, result)
    assert verdict.passed, (verdict.reason, verdict.error)


def mosaic(spec: specs.AttentionSpec, splits: int | None = None):
    """Attention by its public name, or its decode kernel with at most so many shares of the keys."""
    if splits is None:
        return functools.partial(attention, implementation="mosaic")
    if spec.query_len is None:
        pytest.skip("only decodes are split")
    from jaxrunner.pallas.attention_decode_mosaic import decode_attention

    return functools.partial(decode_attention, num_splits=splits, min_tiles=1)


@every_spec
@pytest.mark.parametrize("dtype", ["float32", None])
def test_xla(spec, dtype):
    spec = specs.dataclasses.replace(spec, dtype=dtype or spec.dtype)
    arrays = spec.build()
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation="xla")))


@needs_mosaic
@pytest.mark.parametrize("spec", [s for s in specs.SMALL if s.interpret], ids=str)
def test_mosaic_interpreted(spec):
    """By its public name; the decodes also with shares of the keys that a second kernel combines."""
    arrays = spec.build(seed=1)
    with compat.interpreting():
        result = run(spec, arrays, mosaic(spec, None if spec.query_len is None else 2))
    check(spec, arrays, result)


@needs_mosaic
@pytest.mark.parametrize("spec", [s for s in specs.SMALL if s.interpret and s.query_len], ids=str)
def test_mosaic_interpreted_with_queries_as_rows(spec, monkeypatch):
    """Which are otherwise only for more queries than the other kernel takes, and for float8."""
    from jaxrunner.pallas import attention_decode_columns_mosaic

    monkeypatch.setattr(attention_decode_columns_mosaic, "takes", lambda *_: False)
    arrays = spec.build(seed=1)
    with compat.interpreting():
        result = run(spec, arrays, mosaic(spec, 2))
    check(spec, arrays, result)


@needs_mosaic
def test_mosaic_interpreted_in_several_rounds_of_ctas(monkeypatch):
    """Which are those of the longest requests first."""
    from jaxrunner.pallas import attention_decode_mosaic

    monkeypatch.setattr(attention_decode_mosaic, "NUM_CORES", 1)
    spec = specs.decode("rounds", (70, 1, 130, 0, 16, 129), num_heads=4, num_kv_heads=1)
    arrays = spec.build(seed=3)
    with compat.interpreting():
        result = run(spec, arrays, mosaic(spec, 1))
    check(spec, arrays, result)


def test_the_longest_requests_are_first_and_equal_ones_stay_in_order():
    from jaxrunner.pallas.attention_shares import longest_first

    tiles = np.random.default_rng(0).integers(0, 20, 70).astype(np.int32)
    assert np.asarray(longest_first(jnp.asarray(tiles))).tolist() == np.argsort(-tiles, kind="stable").tolist()


MODELS = {
    "Llama-3-8B": dict(num_heads=32, num_kv_heads=8, head_dim=128),
    "Qwen2-7B": dict(num_heads=28, num_kv_heads=4, head_dim=128),
    "SmolLM2-135M": dict(num_heads=9, num_kv_heads=3, head_dim=64),
    "Gemma-2-2B": dict(num_heads=8, num_kv_heads=4, head_dim=256, soft_cap=50.0, window=4096),
    "gpt-oss-20b": dict(num_heads=64, num_kv_heads=8, head_dim=64, window=128, sinks=True),
    "Phi-3-mini": dict(num_heads=32, num_kv_heads=32, head_dim=96, block_size=32),
    "head 80": dict(num_heads=32, num_kv_heads=32, head_dim=80, block_size=128),
}


def abstract(batch, tokens, *, num_heads, num_kv_heads, head_dim, block_size=16, sinks=False, **options):
    """(arguments, keyword arguments) of `attention` at a server's sizes: 6 layers, more than 2^31 elements."""

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    num_blocks = 2**32 // (6 * 2 * block_size * num_kv_heads * head_dim)
    shape = (6, 2, num_blocks, block_size, num_kv_heads, head_dim)
    metadata = (i32(batch + 1), i32(batch), i32(), i32(batch, 512), i32(tokens))
    q = jax.ShapeDtypeStruct((tokens, num_heads, head_dim), jnp.bfloat16)
    args = [q, jax.ShapeDtypeStruct(shape, jnp.bfloat16), i32(), metadata]
    named = {"sinks": jax.ShapeDtypeStruct((num_heads,), jnp.float32)} if sinks else {}
    return args, named, {"scale": head_dim**-0.5, **options}


@needs_mosaic
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("query_len", [1, 4, None])
def test_mosaic_lowers(model, query_len):
    """At real shapes: the kernel and next to nothing else, no gather of the cache, and it is never copied."""
    batch, tokens = (16, 16 * query_len) if query_len else (16, 512)
    args, named, options = abstract(batch, tokens, **MODELS[model])

    def f(q, blocks, layer, metadata, named):
        metadata = AttentionMetadata(*metadata, query_len=query_len)
        return attention(q, blocks, layer, metadata, implementation="mosaic", **options, **named)

    text = compat.lower_for_cuda(f, *args, named).as_text()
    assert text.count(f"custom_call @{compat.CUSTOM_CALL}") == 1
    assert "dynamic_gather" not in text
    cache = r"x".join(map(str, args[1].shape))
    makers = re.findall(rf"= stablehlo\.(\w+) [^\n]*-> tensor<{cache}xbf16>", text)
    assert not makers


@needs_mosaic
@pytest.mark.parametrize("group", [1, 3, 7, 12, 16])
@pytest.mark.parametrize(("query_len", "head_dim"), [(4, 64), (None, 96), (None, 128)])
def test_mosaic_lowers_for_every_group(group, query_len, head_dim):
    """Rows of tokens begin anywhere in a tile; `lower_for_cuda` refuses swizzled memory that cannot be cut there."""
    args, _, options = abstract(2, 2 * (query_len or 40), num_heads=group, num_kv_heads=1, head_dim=head_dim)

    def f(q, blocks, layer, metadata):
        metadata = AttentionMetadata(*metadata, query_len=query_len)
        return attention(q, blocks, layer, metadata, implementation="mosaic", **options)

    compat.lower_for_cuda(f, *args)


@needs_mosaic
@pytest.mark.parametrize("rows", [(4, 4), (8, 4), (4, 8), (8, 8)], ids=str)
def test_a_copy_to_a_part_of_a_swizzled_tile_is_refused(rows):
    """Rows (start, number): a GPU would swizzle them from the slice's first row on; the interpreter would not."""

    def body(source, target, tile, barrier):
        compat.copy_in(source, tile.at[compat.ds(*rows)], barrier)
        compat.wait(barrier)
        target[...] = compat.load(tile, layout=compat.tile_layout(), optimized=False)

    def f(source):
        scratch = [compat.swizzled_smem((64, 64), jnp.bfloat16), compat.barriers()]
        out = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        return compat.kernel(body, out_type=out, scratch_types=scratch)(source)

    source = jax.ShapeDtypeStruct((rows[1], 64), jnp.bfloat16)
    if rows == (8, 8):
        compat.lower_for_cuda(f, source)
    else:
        with pytest.raises(ImplementationError, match="whole tiles of 8"):
            compat.lower_for_cuda(f, source)


@needs_mosaic
@pytest.mark.parametrize("row_major", [False, True])
def test_swizzled_memory_that_is_cut_within_its_period_is_refused(row_major):
    """Without declared tiles, layout inference swizzles this buffer in tiles of 4 rows: wrong from the second on."""

    def body(source, target, buffer):
        columns = compat.ds(0, 64)
        for i in range(16):
            rows = compat.load(source.at[i], layout=compat.rows_layout(4, 64, 2, in_smem=True), optimized=False)
            buffer[compat.ds(4 * i, 4), columns] = rows
        compat.commit()
        target[...] = compat.load(buffer.at[:, columns], layout=compat.tile_layout(), optimized=False)

    def f(source):
        if row_major:
            buffer = compat.row_major_smem((64, 64), jnp.bfloat16)
        else:
            buffer = compat.plgpu.SMEM((64, 64), jnp.bfloat16)
        out = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
        return compat.kernel(body, out_type=out, scratch_types=[buffer])(source)

    source = jax.ShapeDtypeStruct((16, 4, 64), jnp.bfloat16)
    if row_major:
        compat.lower_for_cuda(f, source)
    else:
        with pytest.raises(ImplementationError, match="swizzles shared memory in tiles of"):
            compat.lower_for_cuda(f, source)


@pytest.mark.gpu
@every_spec
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_mosaic_on_the_gpu(spec, splits):
    arrays = spec.build(seed=2)
    check(spec, arrays, run(spec, arrays, mosaic(spec, splits)))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [64, 300])
def test_mosaic_on_the_gpu_in_several_rounds_of_ctas(batch):
    seq_lens = tuple(int(n) for n in np.random.default_rng(batch).integers(0, 600, batch))
    spec = specs.decode("rounds", seq_lens, num_heads=32, num_kv_heads=8, head_dim=128)
    arrays = spec.build(seed=4)
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation="mosaic")))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_mosaic_on_the_gpu_on_random_batches(seed):
    spec = specs.random_spec(seed)
    arrays = spec.build(seed)
    check(spec, arrays, run(spec, arrays, functools.partial(attention, implementation="mosaic")))


def test_the_work_list_covers_every_token_once():
    from jaxrunner.pallas.attention_prefill_mosaic import work_list

    rng = np.random.default_rng(0)
    for tokens in (3, 32):
        lens = rng.integers(0, 70, 9) * rng.integers(0, 2, 9)
        starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        total = int(starts[-1]) + 50
        requests, offsets = map(np.asarray, work_list(jnp.asarray(starts), total, tokens))
        bounds = np.append(starts, total)
        seen = np.zeros(total, int)
        for request, offset in zip(requests, offsets, strict=True):
            begin = bounds[request] + offset
            seen[begin : min(begin + tokens, bounds[request + 1])] += 1
        assert (seen == 1).all()


def test_mosaic_is_refused_by_name_with_the_reason():
    if UNAVAILABLE is None and jax.default_backend() == "gpu":
        pytest.skip("it runs here")
    spec = specs.SMALL[0]
    reason = r"needs jax 0\.11" if UNAVAILABLE else "the backend is 'cpu'"
    with pytest.raises(ImplementationError, match=reason):
        run(spec, spec.build(), functools.partial(attention, implementation="mosaic"))


@needs_mosaic
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16"),
        ({"head_dim": 72}, "multiple of 16"),
        ({"block_size": 12}, "block size"),
    ],
)
def test_mosaic_refuses_what_it_cannot_take(changes, reason):
    spec = specs.dataclasses.replace(specs.SMALL[0], **changes)
    arrays = spec.build()
    with pytest.raises(ImplementationError, match=reason), compat.interpreting():
        run(spec, arrays, functools.partial(attention, implementation="mosaic"))
    check(spec, arrays, run(spec, arrays, attention))


@pytest.mark.parametrize(
    ("tiles", "ctas", "splits", "expected"),
    [
        ([17] * 64, 8, 2, 17),  # 512 CTAs are two full rounds: sharing could only add rounds
        ([17] * 16, 8, 2, 9),  # 128 CTAs leave half of the GPU idle
        ([17] * 8, 8, 4, 5),
        ([128], 8, 32, 4),
        ([128] + [17] * 63, 8, 2, 64),  # one long request among many
        ([0, 0], 8, 4, 2),
    ],
)
def test_requests_are_split_where_rounds_of_ctas_end_sooner(tiles, ctas, splits, expected):
    from jaxrunner.pallas.attention_shares import tiles_of_share

    assert tiles_of_share(jnp.array(tiles, jnp.int32), ctas, splits, 2, 264).tolist() == [expected]
