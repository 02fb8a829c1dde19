"""Admission: a row is rewritten whole whatever it held, ragged prompts land in their rows, nothing else moves."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import init_state
from jaxrunner.errors import CapacityError, InvariantError
from jaxrunner.state.admission import ENTRIES_PER_CALL, AdmitEntry, admit_layout, apply_admit, pack_admit, release_entry
from jaxrunner.state.fields import RECORD_FIELDS, RECORD_WIDTH, REQUEST_FIELDS
from jaxrunner.state.requests import PARKING_ROW
from tests.stages import harness

ROWS, LENGTH, GARBAGE = 7, 24, 77
LAYOUT = admit_layout(60, 20)
run = jax.jit(functools.partial(apply_admit, layout=LAYOUT))


@functools.cache
def empty_state():
    """Two groups, drafts and two extras."""
    model, _ = harness.tiny("llama", (8, None, 8))
    state = init_state(model, max_requests=ROWS, max_model_len=LENGTH, num_blocks=30, num_draft_tokens=3)
    extras = {"adapter": jnp.zeros((ROWS + 1,), jnp.int32), "recurrent": jnp.zeros((ROWS + 1, 2, 3), jnp.float32)}
    return state.replace(extras=extras)


def garbage_state():
    """Every per-row array full of garbage, the parking row excepted."""

    def fill(leaf):
        return jnp.full_like(leaf, GARBAGE).at[PARKING_ROW].set(0)

    state = empty_state()
    return state.replace(
        requests=jax.tree.map(fill, state.requests),
        sampling=jax.tree.map(fill, state.sampling),
        tables=jax.tree.map(fill, state.tables),
        extras=jax.tree.map(fill, state.extras),
    )


def record(start=100):
    return np.arange(start, start + RECORD_WIDTH, dtype=np.int32)


def writes(*entries):
    return np.array(entries, np.int32).reshape(-1, 4)


def rows_of(state) -> dict[str, np.ndarray]:
    """Every per-row array by name: what admission has to know about."""
    flat = jax.tree_util.tree_leaves_with_path(state.replace(kv=None))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in flat}


def is_reached_by_length(name: str) -> bool:
    """Whether old contents cannot be reached once the row's lengths and numbers of blocks are new."""
    return "token_ids" in name or "block_table" in name


def assert_rows_equal(a, b, rows):
    for name, value in rows_of(a).items():
        np.testing.assert_array_equal(value[rows], rows_of(b)[name][rows], err_msg=name)


def test_every_array_but_the_cache_has_a_row_per_request():
    arrays = rows_of(empty_state())
    assert {value.shape[0] for value in arrays.values()} == {ROWS + 1}
    assert arrays.keys() >= {".requests.counters", ".requests.draft_tokens", ".tables.num_blocks", ".extras['adapter']"}


def test_a_row_full_of_garbage_is_rewritten_whole():
    entry = AdmitEntry(3, record(), np.arange(50, 60, dtype=np.int32), writes((0, 3, 0, 4), (1, 3, 0, 5), (0, 3, 1, 6)))
    packed = pack_admit(LAYOUT, [entry])
    clean, dirty = run(empty_state(), packed), run(garbage_state(), packed)
    for name, value in rows_of(dirty).items():
        row, expected = np.atleast_1d(value[3]), np.atleast_1d(rows_of(clean)[name][3])
        used = {".requests.token_ids": 10, ".tables.block_table[0]": 2, ".tables.block_table[1]": 1}.get(name)
        np.testing.assert_array_equal(row[:used], expected[:used], err_msg=name)
    assert dirty.tables.num_blocks[3].tolist() == [2, 1]
    assert not dirty.requests.draft_tokens[3].any()
    assert not dirty.extras["recurrent"][3].any()
    assert_rows_equal(dirty, garbage_state(), [r for r in range(ROWS + 1) if r != 3])


@pytest.mark.parametrize("column", range(RECORD_WIDTH), ids=[f.name for f in RECORD_FIELDS])
def test_each_field_of_the_record_arrives(column):
    after = run(garbage_state(), pack_admit(LAYOUT, [AdmitEntry(5, record())]))
    columns = np.concatenate([np.asarray(after.requests.counters), np.asarray(after.sampling.params)], axis=1)
    assert columns[5, column] == 100 + column
    assert len(REQUEST_FIELDS) == after.requests.counters.shape[1]


def test_an_entry_without_a_record_leaves_the_row():
    entry = AdmitEntry(4, block_writes=writes((1, 4, 90, 9)))
    after = run(garbage_state(), pack_admit(LAYOUT, [entry]))
    assert after.tables.block_table[1][4, 90] == 9
    assert after.tables.num_blocks[4].tolist() == [GARBAGE, 91]
    expected = garbage_state()
    tables = expected.tables.replace(block_table=after.tables.block_table, num_blocks=after.tables.num_blocks)
    assert_rows_equal(after, expected.replace(tables=tables), slice(None))


def test_releasing_a_row_zeroes_it():
    after = run(garbage_state(), pack_admit(LAYOUT, [release_entry(2), release_entry(6)]))
    for name, value in rows_of(after).items():
        assert is_reached_by_length(name) or not value[[2, 6]].any(), name
    assert_rows_equal(after, garbage_state(), [0, 1, 3, 4, 5, 7])


def test_a_zeroed_upload_is_inert():
    for state in (empty_state(), garbage_state()):
        assert_rows_equal(run(state, np.zeros(LAYOUT.size, np.int32)), state, slice(None))


@pytest.mark.parametrize("seed", range(12))
def test_ragged_prompts_equal_a_loop(seed):
    """Any number of entries, empty prompts and entries without a record among them, junk behind the last of each."""
    rng = np.random.default_rng(seed)
    state = garbage_state()
    expected = {name: value.copy() for name, value in rows_of(state).items()}
    entries, room = [], 60
    for row in rng.permutation(np.arange(1, ROWS + 1))[: rng.integers(1, ROWS + 1)]:
        count = int(min(room, rng.choice([0, 1, 5, LENGTH])))
        room -= count
        tokens = rng.integers(0, 999, count).astype(np.int32)
        has_record = rng.random() < 0.7
        block = writes((1, row, 0, rng.integers(1, 30)))[: rng.integers(0, 2)]
        entries.append(AdmitEntry(int(row), rng.integers(0, 99, RECORD_WIDTH).astype(np.int32), tokens, block))
        if has_record:
            for name, value in expected.items():
                if not is_reached_by_length(name):
                    value[row] = 0
            expected[".requests.counters"][row] = entries[-1].record[: len(REQUEST_FIELDS)]
            expected[".sampling.params"][row] = entries[-1].record[len(REQUEST_FIELDS) :]
        else:
            entries[-1].record = None
        expected[".requests.token_ids"][row, :count] = tokens
        for _, _, column, value in block:
            expected[".tables.block_table[1]"][row, column] = value
            expected[".tables.num_blocks"][row, 1] = max(expected[".tables.num_blocks"][row, 1], column + 1)
    packed = pack_admit(LAYOUT, entries).copy()
    parts = LAYOUT.unpack(packed)  # views
    used = {"row": len(entries), "write_record": len(entries), "record": len(entries), "token_end": len(entries)}
    used |= {"tokens": 60 - room, "block_writes": sum(len(e.block_writes) for e in entries)}
    for section, count in used.items():
        tail = parts[section][count:]
        tail[...] = rng.choice([1, 0, -1, 3, 2**31 - 1], tail.shape)
    after = rows_of(run(state, packed))
    for name, value in expected.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_what_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="tokens"):
        pack_admit(LAYOUT, [AdmitEntry(1, record(), np.zeros(61, np.int32))])
    with pytest.raises(CapacityError, match="block_writes"):
        pack_admit(LAYOUT, [AdmitEntry(1, record(), block_writes=writes(*[(0, 1, c, 1) for c in range(21)]))])
    with pytest.raises(CapacityError, match="row"):
        pack_admit(LAYOUT, [release_entry(row) for row in range(1, ENTRIES_PER_CALL + 2)])


def test_two_entries_may_not_write_one_table_cell():
    with pytest.raises(InvariantError, match="same cell"):
        pack_admit(LAYOUT, [AdmitEntry(1, block_writes=writes((0, 1, 0, 4))) for _ in range(2)])


def test_two_entries_may_not_rewrite_one_row():
    with pytest.raises(InvariantError, match="same row"):
        pack_admit(admit_layout(8, 8), [release_entry(3), release_entry(3)])


def test_list_words_equal_a_loop():
    """Of several entries, with junk behind the last; an entry without a record may bring none."""
    rng = np.random.default_rng(0)
    layout = admit_layout(8, 8, num_list_writes=40)
    state, width = garbage_state(), garbage_state().sampling.sizes.width
    expected, entries = np.array(state.sampling.lists), []
    for row, count in ((4, 0), (2, 17), (7, 23)):
        words = np.stack([rng.permutation(width)[:count], rng.integers(-99, 99, count)], axis=1).astype(np.int32)
        entries.append(AdmitEntry(row, record(), list_writes=words))
        expected[row] = 0
        expected[row, words[:, 0]] = words[:, 1]
    packed = pack_admit(layout, [*entries, AdmitEntry(5)])
    after = jax.jit(functools.partial(apply_admit, layout=layout))(state, packed)
    np.testing.assert_array_equal(after.sampling.lists, expected)
    fewer = pack_admit(layout, entries[:2]).copy()
    layout.unpack(fewer)["list_writes"][17:] = (6, 1, 5)
    after = jax.jit(functools.partial(apply_admit, layout=layout))(state, fewer)
    np.testing.assert_array_equal(after.sampling.lists[6], state.sampling.lists[6])
    with pytest.raises(CapacityError, match="list_writes"):
        pack_admit(layout, [AdmitEntry(1, record(), list_writes=np.ones((41, 2), np.int32))])
