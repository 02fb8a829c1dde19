"""Weights on a CPU: aligned, used where they were built, and in pages of 2 MB where the system gives them."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.models.host_buffers import ALIGNMENT, HUGE_PAGE, HostBuffers
from tests.conftest import load_tiny


def test_arrays_are_aligned_apart_and_as_many_as_announced():
    shapes = [(3, 5), (7,), (), (64, 64), (0, 4)]
    buffers = HostBuffers(shapes, jnp.bfloat16)
    arrays = [buffers.empty(shape) for shape in shapes]
    for i, array in enumerate(arrays):
        array[...] = i
        assert array.ctypes.data % ALIGNMENT == 0
    for i, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape
        assert array.dtype == jnp.bfloat16
        assert (array == i).all()
    with pytest.raises(ValueError, match="not announced"):
        buffers.empty((1,))


def test_jax_takes_the_memory_over_and_keeps_it():
    array = HostBuffers([(1000, 700)], np.float32).empty((1000, 700))
    array[...] = np.arange(700)
    taken, place = jax.device_put(array, may_alias=True), array.ctypes.data
    del array
    assert taken.unsafe_buffer_pointer() == place
    assert (taken == jnp.arange(700)).all()


def test_loaded_weights_are_aligned():
    _, weights = load_tiny("llama")
    assert all(leaf.unsafe_buffer_pointer() % ALIGNMENT == 0 for leaf in jax.tree.leaves(weights))


def test_huge_pages_are_used_where_the_system_gives_them():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("this system gives no huge pages")
    array = HostBuffers([(8 * HUGE_PAGE,)], np.uint8).empty((8 * HUGE_PAGE,))
    array[...] = 1
    assert array.ctypes.data % HUGE_PAGE == 0
