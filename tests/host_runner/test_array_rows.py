"""Arrays of requests on the device follow the rows of the batch by its records: moves, holes, many new ones at once."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner import RequestArray, SamplingParams
from jaxrunner.host_runner.array_rows import ArrayRows
from jaxrunner.host_runner.batch_updates import BatchListener
from jaxrunner.host_runner.dense_batch import DenseBatch
from jaxrunner.host_runner.device_carry import WORDS_PER_CALL, DeviceCarry, arrange, copy_arrays
from jaxrunner.host_runner.input_arrays import HostSizes
from jaxrunner.host_runner.row_fields import RowBank
from jaxrunner.state.kv_cache import KVCache
from jaxrunner.state.request_arrays import GENERATIONS, ArraySet, empty_extras

MOST = 6
SETS = (
    ArraySet("mine", (RequestArray("key", (2,), "uint32", default=None), RequestArray("mean", updated=True))),
    ArraySet("all", (RequestArray("half", dtype="bfloat16", default=0.5),), every_request=True),
)
BANK = {"max_model_len": 8, "num_groups": 1, "table_width": 4, "sampling_width": 2}


def params(number: int) -> SamplingParams:
    return SamplingParams(extra_args={"mine": {"key": np.array([number, 2**32 - 1 - number], np.uint32)}})


class Followed:
    """A dense batch, and a device that keeps up with it."""

    def __init__(self, sets=SETS, num_rows=MOST):
        self.batch = DenseBatch(RowBank(num_rows, BANK), num_rows)
        self.arrays = ArrayRows(num_rows, sets)
        outcome = jnp.zeros((num_rows, 2), jnp.int32)
        extras = empty_extras(sets, num_rows)
        self.carry = DeviceCarry(KVCache((), None), outcome, extras, HostSizes((), 8, custom=sets))

    def tell(self) -> None:
        listener: BatchListener = self.arrays
        if (update := self.batch.take_update()) is not None:
            listener.update_state(update)

    def arrange(self) -> int:
        uploads = self.arrays.take_uploads()
        for upload in uploads:
            self.carry = arrange(self.carry, jnp.asarray(upload))
        return len(uploads)

    def row(self, name: str) -> np.ndarray:
        return np.asarray(self.carry.extras[name].astype(jnp.float32))


LIVES = st.lists(
    st.tuples(st.sets(st.integers(0, 8)), st.sets(st.integers(0, 8)), st.permutations(range(MOST)), st.booleans()),
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(LIVES)
def test_every_row_has_the_arrays_of_its_request(lives):
    """Requests leave and come, one id twice in a step, rows change places; sometimes two such steps meet in one
    arrangement. An array that only the device has moves along, and empty rows are zero."""
    it, means = Followed(), {}
    for leaving, coming, order, at_once in lives:
        for name in leaving | coming:
            it.batch.remove(f"r{name}")
            means.pop(f"r{name}", None)
        for name in coming:
            if it.batch.num_reqs < MOST:
                kept = {"mine.mean": np.float32(name)}
                it.batch.add(f"r{name}", params(name), num_tokens=name, kept=kept)
                means[f"r{name}"] = float(name)
        it.batch.condense()
        it.tell()
        for first, second in zip(order[:2], order[2:4], strict=True):
            if max(first, second) < it.batch.num_reqs and first != second:
                it.batch.swap(first, second)
        it.tell()
        if at_once:
            continue
        it.arrange()
        num_reqs = it.batch.num_reqs
        numbers = [int(req_id[1:]) for req_id in it.batch.rows.req_ids[:num_reqs]]
        key = np.asarray(it.carry.extras["mine.key"])
        assert key[:num_reqs].tolist() == [[n, 2**32 - 1 - n] for n in numbers]
        assert it.row("mine")[:num_reqs].all()
        assert it.row("all.half")[:num_reqs].tolist() == [0.5] * num_reqs
        mean = it.row("mine.mean")
        assert [mean[i, n % GENERATIONS] for i, n in enumerate(numbers)] == [means[f"r{n}"] for n in numbers]
        assert not any(np.asarray(array[num_reqs:]).any() for array in it.carry.extras.values())
        assert it.arrange() == 0
        updated = {f"r{n}": 100.0 + n for n in numbers}  # what a step does
        means.update(updated)
        for i, n in enumerate(numbers):
            extras = it.carry.extras
            new = extras["mine.mean"].at[i, n % GENERATIONS].set(updated[f"r{n}"])
            it.carry = it.carry.replace(extras={**extras, "mine.mean": new})


@pytest.mark.parametrize(("width", "calls"), [(WORDS_PER_CALL, 3), (WORDS_PER_CALL // 2 - 1, 2), (3, 1)])
def test_many_new_requests_go_up_in_calls_of_bounded_size(width, calls):
    """Three new ones while two change places: the move happens once, whatever the number of calls."""
    it = Followed((ArraySet("wide", (RequestArray("bias", (width,)),), every_request=True),))

    def bias(number: int) -> SamplingParams:
        return SamplingParams(extra_args={"wide": {"bias": np.full(width, number)}})

    for number in (1, 2):
        it.batch.add(f"r{number}", bias(number))
    it.tell()
    it.arrange()
    for number in (3, 4, 5):
        it.batch.add(f"r{number}", bias(number))
    it.batch.swap(0, 1)
    it.tell()
    assert it.arrange() == calls
    assert it.row("wide.bias")[:, [0, -1]].T.tolist() == [[2, 1, 3, 4, 5, 0]] * 2


def test_copies_are_of_updated_arrays_alone():
    it = Followed()
    for number in (1, 2):
        it.batch.add(f"r{number}", params(number), num_tokens=3, kept={"mine.mean": np.float32(number)})
    it.tell()
    it.arrange()
    carry, copies = copy_arrays(it.carry, jnp.array([1, 0, 0]))
    assert carry is it.carry
    assert copies.keys() == {"mine.mean"}
    assert np.asarray(copies["mine.mean"])[:, 1].tolist() == [2, 1, 1]
