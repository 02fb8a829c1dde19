"""Every field that is declared is allocated, moved and cleared; nothing else has to know of it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrunner.host_runner.row_fields import ROW_FIELDS, RowBank, RowField

SIZES = {"max_model_len": 12, "num_groups": 2, "table_width": 5, "sampling_width": 3}
NUM_ROWS = 6


def filled(*more: RowField) -> RowBank:
    """Each field holds its row's number plus one in every place, so that a row that moves whole can be told."""
    bank = RowBank(NUM_ROWS, SIZES, (*ROW_FIELDS, *more))
    for field in bank.fields:
        array = getattr(bank, field.name)
        array[:] = (np.arange(NUM_ROWS) + 1).reshape(-1, *(1,) * (array.ndim - 1))
    bank.known[:] = SIZES["max_model_len"]
    return bank


def owners(bank: RowBank, field: RowField) -> list:
    """Whose content each row holds, 0 for nobody's; None where a row is mixed."""
    array = getattr(bank, field.name)
    if field.name == "known":
        return []
    rows = [sorted(set(np.ravel(row).tolist()), key=str) for row in array]
    return [(0 if row == [field.empty] else row[0]) if len(row) == 1 else None for row in rows]


@pytest.mark.parametrize(
    "field", [*ROW_FIELDS, RowField("added_by_this_test", "new", ("num_groups",), empty=-7)], ids=lambda f: f.name
)
def test_a_field_moves_with_its_row(field):
    """The last rows go into the holes, then two rows change places; a field that a test adds is no exception."""
    bank = filled(*([field] if field not in ROW_FIELDS else []))
    bank.clear(np.array([1, 2]))
    bank.relocate(np.array([5, 4]), np.array([1, 2]))
    bank.relocate(np.array([0, 3]), np.array([3, 0]))
    if field.name == "known":
        assert bank.known.tolist() == [12, 12, 12, 12, 0, 0]
    elif field.used is None:
        assert owners(bank, field) == [4, 6, 5, 1, 0, 0]
    else:
        assert owners(bank, field)[:4] == [4, 6, 5, 1]


def test_of_a_wide_field_only_what_is_used_moves():
    bank = RowBank(4, SIZES)
    bank.token_ids[:] = np.arange(4)[:, None] * 100 + np.arange(12)
    bank.known[:] = [3, 5, 2, 0]
    bank.relocate(np.array([0, 1]), np.array([1, 0]))
    assert bank.token_ids[0, :5].tolist() == [100, 101, 102, 103, 104]
    assert bank.token_ids[1, :3].tolist() == [0, 1, 2]
    assert bank.token_ids[1, 5:].tolist() == list(range(105, 112)), "columns that nobody uses are left alone"


def test_a_cycle_of_rows_loses_nothing():
    bank = filled()
    bank.relocate(np.array([2, 0, 1]), np.array([0, 1, 2]))
    assert bank.prompt_len.tolist() == [3, 1, 2, 4, 5, 6]


def test_attributes_are_the_fields():
    """The annotations, which a type checker reads, name the declared fields and no other."""
    assert [*RowBank.__annotations__] == [field.name for field in ROW_FIELDS]
