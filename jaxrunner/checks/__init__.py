"""Checks that a user can run on code of their own: the cases and oracles which this package's tests use."""
