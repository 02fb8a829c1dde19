"""`SteadySteps`: steps that decode the same requests again and again, counted as one number."""

from __future__ import annotations

import numpy as np


class SteadySteps:
    """Each of B requests runs one token in every step and gets one. What differs from request to request is found once,
    and a step is one comparison.

    rows: i32[B], the array that the steps share. start: i32[B], tokens that were scheduled before them. limits: i32[B],
    the most that may be. count: steps so far. samples: bool[B], who gets a token: all.
    """

    __slots__ = ("_left", "_next_left", "count", "rows", "samples", "start")

    def __init__(self, rows: np.ndarray, start: np.ndarray, limits: np.ndarray):
        self.rows, self.start, self.count = rows, start, 0
        self.samples = np.ones(len(rows), bool)
        self.samples.flags.writeable = False
        self._left = self._next_left = limits - start

    def have_room(self, places: np.ndarray | None = None, limits: np.ndarray | None = None) -> bool:
        """Whether one more step stays within the limits. places, limits: i64[n], i32[n], of requests whose limit that
        step raises."""
        left = self._left
        if places is not None:
            left = left.copy()
            left[places] = limits - self.start[places]
        self._next_left = left
        return bool(np.minimum.reduce(left) > self.count)

    def advance(self) -> None:
        """Count the step that `have_room` was asked about."""
        self.count += 1
        self._left = self._next_left
