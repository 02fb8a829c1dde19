"""The runner of the runner's tests."""

from tests.runner.conftest import runner, shared_table

__all__ = ["runner", "shared_table"]
