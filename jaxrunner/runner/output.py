"""Outputs on their way from the device: the copy is started at once, waited for only when somebody asks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.contract import LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, columns, start_copy
from jaxrunner.runner.prompt_reports import Piece, PromptReport
from jaxrunner.sampling.packed_bits import WORD
from jaxrunner.stages.sample import NO_TOKEN, StepOutput
from jaxrunner.timing.ranges import Annotate

NO_ID_LEFT = (
    "its constraints (allowed ids, bad words, min_tokens, grammar, logits processors) forbid every token id, or its "
    "custom sampler took one that they or the filters forbid"
)
NAN_LOGITS = "{} of its logits are NaN; look at the weights, or at the step with jax_debug_nans"


class BatchIds:
    """req_ids: the requests of a batch, in its order. index: their places, found once for all steps of the batch."""

    def __init__(self, req_ids: Sequence[str]):
        self.req_ids = list(req_ids)

    def __len__(self) -> int:
        return len(self.req_ids)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        return dict(zip(self.req_ids, range(len(self.req_ids)), strict=True))


class Asked(NamedTuple):
    """What the requests of a step ask for beside tokens, in batch order.

    num_logprobs: i32[B], best ids, NO_LOGPROBS for none at all. num_listed: i32[B], listed ids. wants_mask: bool[B],
    the ids its token was drawn from. piece: what the step found for prompts; prompts: the requests whose prompts are
    complete with it.
    """

    num_logprobs: np.ndarray
    num_listed: np.ndarray
    wants_mask: np.ndarray
    piece: Piece | None = None
    prompts: tuple[tuple[str, PromptReport], ...] = ()

    @classmethod
    def nothing(cls, num_reqs: int) -> Asked:
        return cls(np.full(num_reqs, NO_LOGPROBS), np.zeros(num_reqs, np.int32), np.zeros(num_reqs, bool))


class AsyncOutput:
    """ids: of the step's requests. output: its device arrays, kept alive until they were copied."""

    def __init__(
        self,
        ids: BatchIds,
        output: StepOutput,
        asked: Asked | None = None,
        *,
        annotate: Annotate = TraceAnnotation,
    ):
        self._annotate = annotate
        self._ids = ids
        self._asked = asked = asked or Asked.nothing(len(ids))
        self._device = output.sampled_token_ids
        self._device_mask = output.sampling_mask if asked.wants_mask.any() else None
        self._device_nans, self._device_failed = output.num_nans, output.failed
        for array in jax.tree.leaves((self._device, self._device_mask, self._device_nans, self._device_failed)):
            array.copy_to_host_async()
        self._device_logprobs = None
        if output.logprobs is not None and (most := int(asked.num_logprobs.max(initial=NO_LOGPROBS))) > NO_LOGPROBS:
            self._device_logprobs = start_copy(output.logprobs, most, int(asked.num_listed.max()))
        self._result: ModelRunnerOutput | None = None

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy. Later calls return the same object."""
        if self._result is None:
            with self._annotate("wait", ready=self._device.is_ready()):  # type: ignore[attr-defined]
                sampled = np.asarray(self._device)
            with self._annotate("postprocess"):
                self._result = self._output(sampled[: len(self._ids)])
        return self._result

    def _output(self, sampled: np.ndarray) -> ModelRunnerOutput:
        tokens, has_token = sampled.tolist(), sampled[:, 0] != NO_TOKEN
        for place in np.flatnonzero((sampled == NO_TOKEN).any(axis=1)).tolist():
            tokens[place] = [t for t in tokens[place] if t != NO_TOKEN]
        result = ModelRunnerOutput(
            req_ids=self._ids.req_ids.copy(),  # the caller's to change
            req_id_to_index=self._ids.index.copy(),
            sampled_token_ids=tokens,
            logprobs=self._logprobs(has_token),
            sampling_masks=self._sampling_masks(has_token),
            sampling_errors=self._sampling_errors(),
            num_nans_in_logits=self._num_nans(),
        )
        self._add_prompts(result)
        return result

    def _add_prompts(self, result: ModelRunnerOutput) -> None:
        if self._asked.piece is not None:
            self._asked.piece.arrays()  # what the device holds is free now, also where a prompt goes on
        for req_id, report in self._asked.prompts:
            logprobs, listed = report.gather()
            if logprobs is not None:
                result.prompt_logprobs_dict[req_id] = logprobs
            if listed is not None:
                result.prompt_token_id_logprobs_dict[req_id] = listed

    def _sampling_errors(self) -> dict[str, str]:
        if self._device_failed is None:
            return {}
        req_ids = self._ids.req_ids
        failed = np.asarray(self._device_failed)[: len(req_ids)]
        num_nans = np.zeros(len(failed), int) if self._device_nans is None else np.asarray(self._device_nans)
        causes = {i: NAN_LOGITS.format(num_nans[i]) if num_nans[i] else NO_ID_LEFT for i in np.flatnonzero(failed)}
        return {req_ids[i]: f"request {req_ids[i]!r}: {cause}" for i, cause in causes.items()}

    def _sampling_masks(self, has_token: np.ndarray) -> SamplingMaskLists | None:
        if self._device_mask is None:
            return None
        words = np.asarray(self._device_mask)[: len(has_token)]
        # Most words are 0 where a filter is on; only the others are taken apart.
        row, place = np.nonzero(np.where((self._asked.wants_mask & has_token)[:, None], words, 0))
        bits = np.unpackbits(words[row, place].astype("<u4")[:, None].view(np.uint8), axis=1, bitorder="little")
        entry, bit = np.nonzero(bits)
        token_ids = place[entry] * WORD + bit
        ends = np.bincount(row[entry], minlength=len(has_token)).cumsum()
        return SamplingMaskLists(token_ids.astype(np.int32), np.concatenate([[0], ends]).astype(np.int32))

    def _logprobs(self, has_token: np.ndarray) -> LogprobsLists | None:
        """The columns that each request asked for. has_token: bool[B], a token was sampled."""
        if self._device_logprobs is None:
            return None
        found = jax.tree.map(np.asarray, self._device_logprobs)
        return columns(found, self._asked.num_logprobs, self._asked.num_listed, has_token)

    def _num_nans(self) -> dict[str, int] | None:
        if self._device_nans is None:
            return None
        return dict(zip(self._ids.req_ids, np.asarray(self._device_nans).tolist(), strict=False))
