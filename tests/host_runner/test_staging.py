"""A staging buffer is not rewritten while a step still reads it: the hazard, and the guard."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrunner.host_runner.staging import ALIGNMENT_BYTES, StagingRing, aligned_zeros
from jaxrunner.state.codec import Layout

LAYOUT = Layout((("ids", (64,)),))


class Reader:
    """Results of a step; it is over when somebody has waited for them."""

    def __init__(self, buffer):
        self.buffer, self.is_over = buffer, False

    def block_until_ready(self):
        self.is_over = True
        return self


def test_the_hazard_memory_that_a_step_reads_is_the_staging_buffer_itself():
    """What the guard is for: on the CPU an aligned buffer is not copied, so writing it changes the device's array."""
    if jax.default_backend() != "cpu":
        pytest.skip("the device has memory of its own; there, the copy is what is still reading")
    vector = aligned_zeros(1024)
    array = jax.device_put(vector)
    vector[:] = 7
    assert np.asarray(array).tolist() == [7] * 1024


def test_a_buffer_in_use_is_waited_for():
    ring = StagingRing(depth=1)
    buffer = ring.acquire(LAYOUT)
    reader = buffer.reader = Reader(buffer)
    assert ring.acquire(LAYOUT) is buffer
    assert reader.is_over


def test_with_one_step_in_flight_nobody_waits():
    """Buffers take turns: the one that is handed out was last read by the step before the last."""
    ring, readers = StagingRing(), []
    for step in range(6):
        buffer = ring.acquire(LAYOUT)
        if step >= 2:
            assert buffer is readers[step - 2].buffer
        assert not any(r.is_over for r in readers[step - 1 :]), "the step in flight was waited for"
        buffer.reader = Reader(buffer)
        readers.append(buffer.reader)


def test_buckets_do_not_share_buffers():
    ring = StagingRing()
    first, other = ring.acquire(LAYOUT), ring.acquire(Layout((("ids", (128,)),)))
    assert not np.shares_memory(first.vector, other.vector)
    assert first.vector.ctypes.data % ALIGNMENT_BYTES == 0
    assert np.shares_memory(first.parts["ids"], first.vector)


def test_a_runner_waits_for_the_reader_of_its_buffer(host_table):
    """The guard is on the path of a step: the result of the launch that read a buffer is what is waited for."""
    from tests.conftest import load_tiny
    from tests.host_runner.plans import host_runner
    from tests.runner.plans import new, plan

    runner = host_runner(load_tiny("llama"), host_table, async_scheduling=True)
    runner.execute_model(plan({"a": 3}, [new("a", [5, 6, 7], [1])]))
    runner.sample_tokens()
    buffers = []
    for _ in range(3):
        runner.execute_model(plan({"a": 1}))
        runner.sample_tokens()
        buffers.append(next(b for b in runner._staging._buffers.values() if b[-1].parts["positions"].size == 4)[-1])
    assert buffers[0] is buffers[2] is not buffers[1]
    assert all(jax.tree.leaves(b.reader) for b in buffers[:2])
