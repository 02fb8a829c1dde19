"""Buckets, ladders and the table of compiled executables."""
