"""The declaration of per-row fields: one column each, and every reader finds its own."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.errors import AdmissionError
from jaxrunner.state import fields
from jaxrunner.state.records import check_token_ids, request_record
from jaxrunner.state.requests import RequestState
from jaxrunner.state.sampling import SamplingState


def full_record(**changes):
    return {**{f.name: i + 1 for i, f in enumerate(fields.RECORD_FIELDS)}, **changes}


def test_names_are_unique_and_documented():
    names = [f.name for f in fields.RECORD_FIELDS]
    assert len(set(names)) == len(names) == fields.RECORD_WIDTH
    assert all(f.doc and f.dtype in ("i32", "f32") for f in fields.RECORD_FIELDS)


def test_a_record_holds_every_field_in_its_column():
    record = fields.encode_record(full_record(temperature=0.7))
    assert record.dtype == np.int32
    for column, field in enumerate(fields.RECORD_FIELDS):
        value = 0.7 if field.name == "temperature" else column + 1
        assert record[column] == (np.float32(value).view(np.int32) if field.dtype == "f32" else value), field.name


@pytest.mark.parametrize("name", [f.name for f in fields.RECORD_FIELDS])
def test_a_record_without_a_field_is_refused(name):
    values = full_record()
    del values[name]
    with pytest.raises(KeyError, match=name):
        fields.encode_record(values)


def test_a_record_with_an_unknown_field_is_refused():
    with pytest.raises(KeyError, match="top_q"):
        fields.encode_record(full_record(top_q=1))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_a_number_past_32_bits_is_refused(value):
    with pytest.raises(OverflowError, match=str(value)):
        fields.encode_record(full_record(total_len=value))


@pytest.mark.parametrize("value", [float("nan"), -0.0, float("inf"), 1e-45, 1.17e-38, 3.4e38])
def test_floats_keep_their_bits(value):
    record = fields.encode_record(full_record(temperature=value))
    column = len(fields.REQUEST_FIELDS) + fields.SAMPLING_COLUMN["temperature"]
    assert record[column : column + 1].tobytes() == np.float32(value).tobytes()
    params = jnp.asarray(record[None, len(fields.REQUEST_FIELDS) :])
    assert np.asarray(SamplingState(params=params).temperature).tobytes() == np.float32(value).tobytes()


@pytest.mark.parametrize("name", [f.name for f in fields.REQUEST_FIELDS])
def test_accessors_of_requests_read_their_own_column(name):
    counters = jnp.arange(3 * len(fields.REQUEST_FIELDS), dtype=jnp.int32).reshape(3, -1)
    state = RequestState(token_ids=jnp.zeros((3, 4), jnp.int32), counters=counters)
    np.testing.assert_array_equal(getattr(state, name), counters[:, fields.REQUEST_COLUMN[name]])


def test_accessors_of_sampling_read_their_own_columns():
    params = jnp.arange(3 * len(fields.SAMPLING_FIELDS), dtype=jnp.int32).reshape(3, -1)
    seed = SamplingState(params=params).seed
    np.testing.assert_array_equal(seed[:, 0], params[:, fields.SAMPLING_COLUMN["seed_lo"]])
    np.testing.assert_array_equal(seed[:, 1], params[:, fields.SAMPLING_COLUMN["seed_hi"]])
    taken = SamplingState(params=params).take(jnp.array([2, 0]))
    np.testing.assert_array_equal(taken.params, params[jnp.array([2, 0])])


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63, 2**64 - 1, -1, -(2**63)])
def test_a_seed_is_two_words(seed):
    low, high = fields.split_seed(seed)
    assert (high % 2**32) * 2**32 + low % 2**32 == seed % 2**64
    assert all(-(2**31) <= word < 2**31 for word in (low, high))


def decoded(record):
    """Name -> word of a record."""
    return dict(zip((f.name for f in fields.RECORD_FIELDS), record.tolist(), strict=True))


def test_the_record_of_a_request():
    params = SamplingParams(temperature=0.5, seed=2**33 + 9)
    record = decoded(request_record(prompt_len=4, prefill_len=7, num_computed_tokens=3, params=params, seed=1))
    expected = dict(prompt_len=4, prefill_len=7, total_len=7, num_computed_tokens=3, last_sampled_token=0)
    expected |= dict(temperature=int(np.float32(0.5).view(np.int32)), seed_lo=9, seed_hi=2)
    assert record | expected == record


def test_a_request_without_a_seed_takes_the_one_it_is_given():
    record = request_record(prompt_len=1, prefill_len=1, num_computed_tokens=0, params=SamplingParams(), seed=2**34 + 6)
    assert (decoded(record)["seed_lo"], decoded(record)["seed_hi"]) == (6, 4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([[1]], "flat list"),
        ([[1], [2, 3]], "flat list"),
        ([0.5], "integer"),
        ([True], "integer"),
        ([3, 10], "token id 10 at position 1"),
        ([-1], "token id -1 at position 0"),
        ([2**40], str(2**40)),
    ],
)
def test_token_ids_that_cannot_be_run_are_refused(ids, message):
    with pytest.raises(AdmissionError, match=message):
        check_token_ids(ids, 10)
