"""A small engine over a runner: scheduling, block allocation, stopping, text."""
