"""The packed upload: what goes in comes out bit for bit, and nothing is cut in silence."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrunner.errors import CapacityError
from jaxrunner.state.codec import Layout
from jaxrunner.state.fields import split_seed

LAYOUT = Layout((("count", ()), ("rows", (4,)), ("table", (3, 2)), ("empty", (0, 4)), ("last", (2,))))


@pytest.mark.parametrize("seed", range(4))
def test_round_trip(seed):
    rng = np.random.default_rng(seed)
    values = {
        name: rng.integers(-(2**31), 2**31, (rng.integers(0, shape[0] + 1), *shape[1:]) if shape else ())
        for name, shape in LAYOUT.sections
    }
    vector = LAYOUT.pack(values)
    for parts in (LAYOUT.unpack(vector), jax.jit(LAYOUT.unpack)(vector)):
        assert {name: part.shape for name, part in parts.items()} == dict(LAYOUT.sections)
        for name, value in values.items():
            part = np.asarray(parts[name])
            if value.ndim:
                assert not part[len(value) :].any(), "what was not given must be zero"
                part = part[: len(value)]
            np.testing.assert_array_equal(part, value)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_rows_join_a_copy_of_a_packed_vector(num_rows):
    base = LAYOUT.pack({"rows": [1, 2, 3, 4], "last": [5, 6]})
    before, table = base.copy(), np.arange(7, 13, dtype=np.int32).reshape(3, 2)[:num_rows]
    found = LAYOUT.with_rows(base, "table", table, counted_in="count")
    whole = LAYOUT.pack({"count": num_rows, "rows": [1, 2, 3, 4], "table": table, "last": [5, 6]})
    np.testing.assert_array_equal(found, whole)
    np.testing.assert_array_equal(base, before)
    assert not found.flags.writeable


def test_rows_that_are_too_many_or_of_another_type_are_refused():
    base = LAYOUT.pack({})
    with pytest.raises(CapacityError, match="4 entries do not fit the section 'table' of 3"):
        LAYOUT.with_rows(base, "table", np.zeros((4, 2), np.int32), counted_in="count")
    with pytest.raises(TypeError, match="'table' takes int32 here, got int64"):
        LAYOUT.with_rows(base, "table", np.zeros((1, 2), np.int64), counted_in="count")


def test_floats_travel_bit_cast():
    values = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-45, 1.1754942e-38, 3.4028235e38, 0.1], np.float32)
    values[:1].view(np.uint32)[0] = 0x7FC12345  # a NaN with a payload
    layout = Layout((("x", (8,)),))
    words = layout.unpack(jnp.asarray(layout.pack({"x": values.view(np.int32)})))["x"]
    floats = jax.jit(lambda w: lax.bitcast_convert_type(w, jnp.float32))(words)
    assert np.asarray(floats).tobytes() == values.tobytes()


@pytest.mark.parametrize("seed", [0, 2**32 + 7, 2**63, 2**64 - 1, -1])
def test_seeds_travel_as_two_words(seed):
    layout = Layout((("seed", (2,)),))
    words = np.asarray(layout.unpack(layout.pack({"seed": np.array(split_seed(seed))}))["seed"])
    assert int(np.ascontiguousarray(words).view(np.uint64)[0]) == seed % 2**64


@pytest.mark.parametrize(
    "value", [np.array([2**32 + 7]), np.array([2**31]), np.array([-(2**31) - 1]), np.array([2**31], np.uint32)]
)
def test_a_number_past_32_bits_is_refused(value):
    with pytest.raises(OverflowError, match=r"'rows'.*32 bits"):
        LAYOUT.pack({"rows": value})


def test_a_scalar_past_32_bits_is_refused():
    with pytest.raises(OverflowError, match="'count'"):
        LAYOUT.pack({"count": 2**31})


@pytest.mark.parametrize("value", [np.array([0.5]), np.array([True]), [1.0]])
def test_numbers_that_are_not_integers_are_refused(value):
    with pytest.raises(TypeError, match="'rows' takes integers"):
        LAYOUT.pack({"rows": value})


def test_too_many_entries_are_refused():
    with pytest.raises(CapacityError, match="5 entries do not fit the section 'rows' of 4"):
        LAYOUT.pack({"rows": np.zeros(5, np.int32)})
    with pytest.raises(CapacityError, match="'table' of 3"):
        LAYOUT.pack({"table": np.zeros((4, 2), np.int32)})


@pytest.mark.parametrize("shape", [(3, 1), (2,), (1, 1), (3, 3)])
def test_entries_of_another_shape_are_not_broadcast(shape):
    with pytest.raises(ValueError, match="'table'"):
        LAYOUT.pack({"table": np.ones(shape, np.int32)})


def test_an_unknown_section_is_refused():
    with pytest.raises(KeyError, match="tabel"):
        LAYOUT.pack({"tabel": np.zeros(1, np.int32)})


@pytest.mark.parametrize("vector", [np.zeros(LAYOUT.size + 1, np.int32), np.zeros(LAYOUT.size, np.int64)])
def test_a_vector_of_another_kind_is_refused(vector):
    with pytest.raises(ValueError, match=rf"expected i32\[{LAYOUT.size}\]"):
        LAYOUT.unpack(vector)


def test_a_vector_is_fresh_and_read_only():
    values = {"rows": np.arange(4, dtype=np.int32)}
    first, second = LAYOUT.pack(values), LAYOUT.pack(values)
    assert not np.shares_memory(first, second)
    assert not np.shares_memory(first, values["rows"])
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_every_section_starts_at_a_multiple_of_256_bytes():
    """XLA may pass a section to a kernel as a pointer into the upload; an unaligned one is refused on a GPU."""
    from jaxrunner.state.codec import Layout

    layout = Layout((("a", ()), ("b", (5,)), ("c", (64,)), ("d", (3, 40)), ("e", (1,))))
    starts = {}
    for name, shape in layout.sections:
        vector = layout.pack({name: np.full(shape, 7) if shape else 7})
        starts[name] = int(np.flatnonzero(vector)[0]) * 4
    assert starts == {"a": 0, "b": 256, "c": 512, "d": 768, "e": 1280}


def test_a_vector_assembled_on_the_device_equals_the_packed_one():
    import jax.numpy as jnp

    from jaxrunner.state.codec import Layout

    layout = Layout((("a", ()), ("b", (5,)), ("c", (3, 40)), ("d", (2,))))
    values = {"a": 3, "b": np.arange(5), "c": np.arange(120).reshape(3, 40)}
    assembled = layout.assemble({name: jnp.asarray(value) for name, value in values.items()})
    np.testing.assert_array_equal(assembled, layout.pack(values))
    with pytest.raises(KeyError, match="e"):
        layout.assemble({"e": jnp.zeros(1)})
