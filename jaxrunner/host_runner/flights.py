"""`Flights`: steps that were launched, from there until their tokens are entered into the rows of their requests."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxrunner.contract import NO_TOKEN
from jaxrunner.host_runner.dense_batch import DenseBatch
from jaxrunner.host_runner.row_fields import NONE
from jaxrunner.stages.sample import StepOutput


class Flights:
    """Up to two steps, each with a column of the rows' `flight_*` fields, which say where a request was when its step
    was launched. column: of the newest one.
    """

    def __init__(self, batch: DenseBatch):
        self.column = 0
        self._batch = batch
        self._outputs: deque[tuple[int, StepOutput, bool]] = deque()

    def take_off(self, num_reqs: int) -> np.ndarray:
        """Count a step that was launched: its tokens, and one more known token for each row that samples. Returns which
        do, bool[num_reqs]."""
        rows, column = self._batch.rows, 1 - self.column
        self.column = column
        counts = rows.scheduled[:num_reqs]
        rows.computed[:num_reqs] += counts
        ends = rows.computed[:num_reqs]
        samples = ends == rows.known[:num_reqs]
        rows.known[:num_reqs] += samples
        rows.flight_row[:num_reqs, column] = np.arange(num_reqs)
        rows.flight_len[:num_reqs, column] = counts
        rows.flight_end[:num_reqs, column] = np.where(samples, ends, NONE)
        return samples

    def add(self, output: StepOutput, *, may_forbid: bool = True) -> None:
        """The result of the step that took off last. may_forbid: see `StepOutput.failures`."""
        self._outputs.append((self.column, output, may_forbid))

    def land(self, most_left: int) -> None:
        """Enter the tokens of the oldest steps into the rows of their requests, wherever those are by now.

        A row that failed is as it was before the step: its tokens do not count as computed.
        """
        rows = self._batch.rows
        while len(self._outputs) > most_left:
            column, output, may_forbid = self._outputs.popleft()
            flown = np.flatnonzero(rows.flight_row[: self._batch.num_reqs, column] != NONE)
            places, ends = rows.flight_row[flown, column], rows.flight_end[flown, column]
            tokens = np.asarray(output.sampled_token_ids)[places, 0]
            stored = (tokens != NO_TOKEN) & (ends != NONE) & (ends < rows.token_ids.shape[1])
            rows.token_ids[flown[stored], ends[stored]] = tokens[stored]
            if (failed := output.failures(may_forbid=may_forbid)) is not None:
                self._undo(flown[np.asarray(failed)[places]])
            rows.flight_row[flown, column] = rows.flight_end[flown, column] = NONE

    def _undo(self, failed: np.ndarray) -> None:
        """These rows are as they were before all steps in flight: the later one has no input for them either."""
        rows = self._batch.rows
        is_flown = rows.flight_row[failed] != NONE
        rows.known[failed] -= (is_flown & (rows.flight_end[failed] != NONE)).sum(axis=1)
        rows.computed[failed] -= np.where(is_flown, rows.flight_len[failed], 0).sum(axis=1)
        rows.flight_row[failed] = rows.flight_end[failed] = NONE
