"""Runners: the mutable objects that drive the pure step from scheduler outputs."""
