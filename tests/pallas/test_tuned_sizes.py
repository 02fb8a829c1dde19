"""Tuned sizes: found by device and shape, taken by the kernels, and only arguments that these have."""

from __future__ import annotations

import inspect
import json
import re

import jax
import jax.numpy as jnp
import pytest

from benchmarks import tune
from jaxrunner.pallas import compat, tuned_sizes
from jaxrunner.pallas.attention_decode_mosaic import decode_attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.attention_prefill_mosaic import ragged_attention
from jaxrunner.pallas.target import Target, tracing_for

KERNELS = {"attention_decode": decode_attention, "attention_prefill": ragged_attention}
H200 = Target("gpu", "9.0", 132, "NVIDIA H200")
SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": "bfloat16", "query_len": 1}


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Writes sizes for an H200, where the kernels look for them."""
    monkeypatch.setattr(tuned_sizes, "FOLDER", tmp_path)

    def write(sizes: dict) -> None:
        tuned_sizes.path_of(H200.kind).write_text(json.dumps({"sizes": sizes}))
        tuned_sizes._table.cache_clear()

    yield write
    tuned_sizes._table.cache_clear()


def test_sizes_are_found_by_device_and_shape(tuned):
    tuned({tuned_sizes.key_of("attention_decode", batch=8, **SHAPE): {"num_splits": 3}})
    with tracing_for(H200):
        assert tuned_sizes.sizes_for("attention_decode", batch=8, **SHAPE) == {"num_splits": 3}
        assert tuned_sizes.sizes_for("attention_decode", batch=16, **SHAPE) == {}
        assert tuned_sizes.sizes_for("attention_prefill", batch=8, **SHAPE) == {}
    with tracing_for(H200._replace(kind="NVIDIA H100 80GB HBM3")):
        assert tuned_sizes.sizes_for("attention_decode", batch=8, **SHAPE) == {}


@pytest.mark.skipif(compat.unavailable_reason() is not None, reason="Mosaic GPU is not available")
def test_the_decode_kernel_takes_them(tuned):
    """The most shares of a request is an axis of what they leave."""

    def shares() -> str | None:
        metadata = [jnp.zeros(shape, jnp.int32) for shape in (9, 8, (), (8, 128), 8)]

        def f(q, blocks, *metadata):
            metadata = AttentionMetadata(*metadata, query_len=1)
            return decode_attention(q, blocks, jnp.int32(0), metadata, scale=0.1)

        q = jax.ShapeDtypeStruct((8, 32, 128), jnp.bfloat16)
        blocks = jax.ShapeDtypeStruct((1, 2, 64, 16, 8, 128), jnp.bfloat16)
        with tracing_for(H200):
            text = compat.lower_for_cuda(f, q, blocks, *metadata).as_text()
        found = re.search(r"tensor<8x1x8x(\d+)x4x128xf32>", text)
        return found and found[1]

    tuned({})
    assert shares() == "6"
    for splits, expected in ((3, "3"), (1, None)):
        tuned({tuned_sizes.key_of("attention_decode", batch=8, **SHAPE): {"num_splits": splits}})
        assert shares() == expected


def test_the_tuner_asks_for_what_the_kernels_look_up(tuned):
    case = next(case for case in tune.cases() if len(case.requests) == 8)
    assert tune.key_of(case) == tuned_sizes.key_of("attention_decode", batch=8, **SHAPE)
    for case in tune.cases():
        kernel = decode_attention if case.is_decode else ragged_attention
        assert {name for sizes in tune.candidates(case) for name in sizes} <= set(inspect.signature(kernel).parameters)


def test_a_decode_is_also_tuned_for_one_request_with_many_more_keys():
    for case in tune.cases():
        if not case.is_decode:
            continue
        lens, uniform = ([n for _, n in c.requests] for c in (tune.skewed(case), case))
        assert len(lens) == len(uniform)
        if len(lens) == 1:
            assert lens[0] == 8 * uniform[0]
        else:
            assert sum(lens) <= sum(uniform)
            assert lens[0] == min(8 * uniform[0], sum(uniform) * 3 // 4)


@pytest.mark.parametrize("path", sorted(tuned_sizes.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_files_that_are_shipped_name_arguments_that_exist(path):
    for key, sizes in json.loads(path.read_text(encoding="utf-8"))["sizes"].items():
        assert sizes, key
        assert set(sizes) <= set(inspect.signature(KERNELS[key.split()[0]]).parameters), key
