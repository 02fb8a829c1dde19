"""Rows: permanent for a request's life, never the parking row, reused last freed first."""

from __future__ import annotations

import pytest

from jaxrunner.errors import CapacityError
from jaxrunner.runner.rows import RowMap


def test_rows_start_after_the_parking_row_and_are_reused():
    rows = RowMap(3)
    assert [rows.add(r) for r in "abc"] == [1, 2, 3]
    assert rows.remove("b") == 2
    assert rows.add("d") == 2
    assert rows.take(["d", "a", "c"]).tolist() == [2, 1, 3]
    assert rows.remove("unknown") is None


def test_a_full_map_names_the_request():
    rows = RowMap(1)
    rows.add("a")
    with pytest.raises(CapacityError, match="'b'"):
        rows.add("b")
