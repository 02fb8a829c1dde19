"""Outputs on their way from the device: the copy is started at once, waited for only when somebody asks."""

from __future__ import annotations

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.contract import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from jaxrunner.sampling.packed_bits import WORD
from jaxrunner.stages.sample import NO_TOKEN, StepOutput
from jaxrunner.timing.ranges import Annotate

NO_LOGPROBS = -1
"""Stands for a request that asks for no log-probabilities; 0 asks for those of its own tokens."""
NO_ID_LEFT = "its constraints (allowed ids, bad words, min_tokens, grammar) forbid every token id"


class AsyncOutput:
    """req_ids: in batch order. output: the step's device arrays, kept alive until they were copied.

    num_logprobs: i32[B], how many best ids' log-probabilities each request asks for, NO_LOGPROBS for none at all.
    wants_mask: bool[B], whether it asks for the ids its token was drawn from. annotate: names the ranges "wait" and
    "postprocess", see `jaxrunner.timing.ranges`.
    """

    def __init__(
        self,
        req_ids: list[str],
        output: StepOutput,
        num_logprobs: np.ndarray | None = None,
        wants_mask: np.ndarray | None = None,
        *,
        annotate: Annotate = TraceAnnotation,
    ):
        self._annotate = annotate
        self._req_ids = req_ids
        none = np.full(len(req_ids), NO_LOGPROBS)
        self._num_logprobs = none if num_logprobs is None else num_logprobs
        asked = (self._num_logprobs > NO_LOGPROBS).any()
        self._device = output.sampled_token_ids
        self._device_logprobs = output.logprobs if asked else None
        self._wants_mask = np.zeros(len(req_ids), bool) if wants_mask is None else wants_mask
        self._device_mask = output.sampling_mask if self._wants_mask.any() else None
        self._no_id_left = output.no_id_left
        for array in jax.tree.leaves((self._device, self._device_logprobs, self._device_mask, self._no_id_left)):
            array.copy_to_host_async()
        self._result: ModelRunnerOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy. Later calls return the same object."""
        if self._result is None:
            with self._annotate("wait", ready=self._device.is_ready()):  # type: ignore[attr-defined]
                sampled = np.asarray(self._device)
            with self._annotate("postprocess"):
                self._result = self._output(sampled[: len(self._req_ids)])
        return self._result

    def _output(self, sampled: np.ndarray) -> ModelRunnerOutput:
        tokens, has_token = sampled.tolist(), sampled[:, 0] != NO_TOKEN
        if (sampled == NO_TOKEN).any():
            tokens = [[t for t in row if t != NO_TOKEN] for row in tokens]
        return ModelRunnerOutput(
            req_ids=self._req_ids,
            req_id_to_index=dict(zip(self._req_ids, range(len(sampled)), strict=True)),
            sampled_token_ids=tokens,
            logprobs=self._logprobs(has_token),
            sampling_masks=self._sampling_masks(has_token),
            sampling_errors=self._sampling_errors(),
        )

    def _sampling_errors(self) -> dict[str, str]:
        if self._no_id_left is None:
            return {}
        stuck = np.flatnonzero(np.asarray(self._no_id_left)[: len(self._req_ids)])
        return {self._req_ids[i]: f"request {self._req_ids[i]!r}: {NO_ID_LEFT}" for i in stuck}

    def _sampling_masks(self, has_token: np.ndarray) -> SamplingMaskLists | None:
        if self._device_mask is None:
            return None
        words = np.asarray(self._device_mask)[: len(has_token)]
        # Most words are 0 where a filter is on; only the others are taken apart.
        row, place = np.nonzero(np.where((self._wants_mask & has_token)[:, None], words, 0))
        bits = np.unpackbits(words[row, place].astype("<u4")[:, None].view(np.uint8), axis=1, bitorder="little")
        entry, bit = np.nonzero(bits)
        token_ids = place[entry] * WORD + bit
        ends = np.bincount(row[entry], minlength=len(has_token)).cumsum()
        return SamplingMaskLists(token_ids.astype(np.int32), np.concatenate([[0], ends]).astype(np.int32))

    def _logprobs(self, has_token: np.ndarray) -> LogprobsLists | None:
        """The columns that each request asked for. has_token: bool[B], a token was sampled."""
        if self._device_logprobs is None:
            return None
        found = self._device_logprobs
        ids, values, ranks = map(np.asarray, (found.logprob_token_ids, found.logprobs, found.sampled_token_ranks))
        count, asked = len(has_token), np.where(has_token, self._num_logprobs, NO_LOGPROBS)
        width = min(int(self._num_logprobs.max()) + 1, values.shape[1])
        shown = np.arange(width) <= asked[:, None]
        return LogprobsLists(
            np.where(shown, ids[:count, :width], NO_TOKEN),
            np.where(shown, values[:count, :width], np.float32(-np.inf)),
            np.where(asked > NO_LOGPROBS, ranks[:count], 0),
        )
