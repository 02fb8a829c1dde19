"""Random lives of rows: dense, in the order of the regions, and told completely by the batch-update records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner import SamplingParams
from jaxrunner.errors import CapacityError
from jaxrunner.host_runner.batch_updates import BatchUpdate, MoveKind, follow, swaps_of
from jaxrunner.host_runner.dense_batch import DECODE, LEFT_OUT, LONG_EXTEND, PREFILL, SHORT_EXTEND, DenseBatch
from jaxrunner.host_runner.row_fields import RowBank

SIZES = {"max_model_len": 16, "num_groups": 1, "table_width": 4, "sampling_width": 2}
MOST = 6


def batch_of(**scheduled: int) -> DenseBatch:
    """Requests with so many scheduled tokens. A name's first letter is its region: d, s, l, p; n is left out."""
    batch = DenseBatch(RowBank(MOST, SIZES), MOST)
    for name, count in scheduled.items():
        row = batch.add(name, SamplingParams())
        rows = batch.rows
        rows.scheduled[row], rows.prompt_len[row] = count, ord(name[1])
        rows.prefill_len[row], rows.known[row] = 8, 8
        rows.computed[row] = {"d": 8, "s": 7, "l": 2, "p": 0, "n": 3}[name[0]]
    batch.take_update()
    return batch


def order(batch: DenseBatch) -> str:
    return " ".join(batch.rows.req_ids[: batch.num_reqs])


def test_regions_come_in_order_and_only_misplaced_rows_move():
    batch = batch_of(p1=4, d1=1, n1=0, l1=3, d2=1, s1=1)
    assert batch.regions().tolist() == [PREFILL, DECODE, LEFT_OUT, LONG_EXTEND, DECODE, SHORT_EXTEND]
    batch.reorder()
    assert order(batch) == "d2 d1 s1 l1 p1 n1"
    assert batch.rows.prompt_len[:6].tolist() == [ord(c) for c in "211111"]
    assert batch.row_of == {name: row for row, name in enumerate(order(batch).split())}
    update = batch.take_update()
    assert {m.kind for m in update.moved} == {MoveKind.SWAP}
    batch.reorder()
    assert batch.take_update() is None


def test_the_version_is_another_one_whenever_rows_have_changed():
    batch = batch_of(p1=4, d1=1, d2=1)
    versions = [batch.version]
    for change in (
        batch.reorder,
        lambda: batch.swap(0, 1),
        lambda: batch.remove("d1"),
        batch.condense,
        lambda: batch.add("n1", SamplingParams()),
    ):
        before = batch.row_of.copy()
        change()
        assert (batch.row_of != before) == (batch.version != versions[-1])
        versions.append(batch.version)
    assert len(set(versions)) == len(versions)
    batch.reorder()
    version = batch.version
    batch.reorder()
    batch.remove("unknown")
    batch.condense()
    assert batch.version == version


def test_the_prompt_from_its_beginning_is_a_prefill_however_short():
    batch = batch_of(p1=1, d1=1)
    batch.reorder()
    assert order(batch) == "d1 p1"


def test_the_lowest_hole_is_filled_first_and_the_rest_from_the_end():
    batch = batch_of(d1=1, d2=1, d3=1, d4=1, d5=1)
    for name in ("d4", "d2", "d1"):
        batch.remove(name)
    assert batch.add("new", SamplingParams()) == 0
    batch.condense()
    assert order(batch) == "new d5 d3"
    update = batch.take_update()
    assert update.removed == (1, 3)
    assert [a.row for a in update.added] == [0]
    assert [(m.source, m.target, m.kind) for m in update.moved] == [(4, 1, MoveKind.ONE_WAY)]


def test_two_requests_change_rows():
    batch = batch_of(d1=1, p2=4)
    batch.swap(0, 1)
    assert order(batch) == "p2 d1"
    assert batch.rows.computed[:2].tolist() == [0, 8]
    assert batch.row_of == {"p2": 0, "d1": 1}


def test_a_full_batch_takes_nobody():
    batch = batch_of(d1=1, d2=1, d3=1, d4=1, d5=1, d6=1)
    with pytest.raises(CapacityError, match="'late'"):
        batch.add("late", SamplingParams())


@given(st.permutations(range(6)))
def test_a_permutation_as_swaps(target):
    source, array = np.arange(6), np.arange(6)
    follow(array, tuple(swaps_of(source, np.array(target))))
    assert array[target].tolist() == source.tolist()


class Mirror:
    """Who is in which row, from the records alone."""

    def __init__(self):
        self.names = np.full(MOST, None, object)

    def update_state(self, update: BatchUpdate) -> None:
        self.names[list(update.removed)] = None
        for added in update.added:
            self.names[added.row] = added.req_id
        follow(self.names, update.moved, empty=None)
        self.size = update.batch_size


STEPS = st.lists(
    st.tuples(
        st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.lists(st.integers(0, 4), min_size=6, max_size=6)
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_records_alone_tell_who_is_where(steps):
    """Requests leave and come, with one id twice in a step, and are reordered; then every row is where the map says,
    and a listener knows as much."""
    batch, mirror, number = DenseBatch(RowBank(MOST, SIZES), MOST), Mirror(), {}
    for leaving, coming, scheduled in steps:
        for name in leaving:
            batch.remove(f"r{name}")
        for name in coming:
            batch.remove(f"r{name}")
            if batch.num_reqs < MOST:
                row = batch.add(f"r{name}", SamplingParams())
                number[f"r{name}"] = batch.rows.prompt_len[row] = len(number) + 1
                batch.rows.prefill_len[row] = batch.rows.known[row] = 4
                batch.rows.token_ids[row, :4] = name
        batch.condense()
        for update in (batch.take_update(),):
            if update is not None:
                mirror.update_state(update)
        n = batch.num_reqs
        batch.rows.scheduled[:n] = scheduled[:n]
        batch.rows.computed[:n] = [4 if count == 1 else 0 for count in scheduled[:n]]
        batch.reorder()
        assert (np.diff(batch.regions()) >= 0).all()
        if (update := batch.take_update()) is not None:
            mirror.update_state(update)
        names = batch.rows.req_ids[:n].tolist()
        assert batch.row_of == {name: row for row, name in enumerate(names)}
        assert mirror.names.tolist() == names + [None] * (MOST - n)
        assert batch.rows.prompt_len[:n].tolist() == [number[name] for name in names]
        assert batch.rows.token_ids[:n, 3].tolist() == [int(name[1:]) for name in names]
