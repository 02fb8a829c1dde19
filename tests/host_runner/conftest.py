"""The executables of these tests are those of `tests.runner`."""

from __future__ import annotations

from tests.runner.conftest import host_table, shared_table

__all__ = ["host_table", "shared_table"]
