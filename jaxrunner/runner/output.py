"""Outputs on their way from the device: the copy is started at once, waited for only when somebody asks."""

from __future__ import annotations

import numpy as np

from jaxrunner.contract import ModelRunnerOutput
from jaxrunner.stages.sample import NO_TOKEN, StepOutput


class AsyncOutput:
    """req_ids: in batch order. output: the step's device arrays, kept alive until they were copied."""

    def __init__(self, req_ids: list[str], output: StepOutput):
        self._req_ids = req_ids
        self._device = output.sampled_token_ids
        self._device.copy_to_host_async()
        self._result: ModelRunnerOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy. Later calls return the same object."""
        if self._result is None:
            sampled = np.asarray(self._device)[: len(self._req_ids)]
            tokens = [[t for t in row if t != NO_TOKEN] for row in sampled.tolist()]
            self._result = ModelRunnerOutput(
                req_ids=self._req_ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(self._req_ids)},
                sampled_token_ids=tokens,
            )
        return self._result
