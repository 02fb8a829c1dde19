"""Outputs on their way from the device: the copy is started at once, waited for only when somebody asks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.profiler import TraceAnnotation

from jaxrunner.contract import NO_TOKEN, LogprobsLists, ModelRunnerOutput, SamplingMaskLists
from jaxrunner.runner.logprob_columns import NO_LOGPROBS, columns, start_copy
from jaxrunner.runner.prompt_reports import Piece, PromptReport
from jaxrunner.sampling.packed_bits import WORD
from jaxrunner.stages.sample import StepOutput
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


_NOT_MADE: dict[str, Any] = dict.fromkeys(("req_ids", "req_id_to_index", "sampled_token_ids"))


class SampledOutput(ModelRunnerOutput):
    """An output of the requests `ids` whose tokens are an array, i32[B, K]. The fields that hold something for each
    request are made of these when they are read first, and are the reader's to change."""

    def __init__(self, ids: BatchIds | None = None, sampled: np.ndarray | None = None, **fields: Any):
        if ids is None or sampled is None:  # a changed copy, see `dataclasses.replace`: it has all fields
            super().__init__(**fields)
        else:
            super().__init__(**_NOT_MADE, **fields)
            del self.req_ids, self.req_id_to_index, self.sampled_token_ids
            self._ids, self._sampled = ids, sampled

    @functools.cached_property
    def req_ids(self) -> list[str]:  # type: ignore[override]
        return self._ids.req_ids.copy()

    @functools.cached_property
    def req_id_to_index(self) -> dict[str, int]:  # type: ignore[override]
        return self._ids.index.copy()

    @functools.cached_property
    def sampled_token_ids(self) -> list[list[int]]:  # type: ignore[override]
        tokens = self._sampled.tolist()
        for place in (self._sampled == NO_TOKEN).any(axis=1).nonzero()[0].tolist():
            tokens[place] = [t for t in tokens[place] if t != NO_TOKEN]
        return tokens

    @property
    def sampled(self) -> np.ndarray:
        return super().sampled if "sampled_token_ids" in self.__dict__ else self._sampled

    def order(self, req_ids: list[str]) -> np.ndarray | None:
        return None if "req_ids" not in self.__dict__ and self._ids.req_ids == req_ids else super().order(req_ids)


class AsyncOutput:
    """ids: of the step's requests. output: its device arrays, kept alive until they were copied. may_forbid: see
    `StepOutput.failures`. starts_copy: of the tokens; without it they are copied by `get_output`, which costs less
    where that is called at once."""

    def __init__(
        self,
        ids: BatchIds,
        output: StepOutput,
        asked: Asked | None = None,
        *,
        may_forbid: bool = True,
        starts_copy: bool = True,
        annotate: Annotate = TraceAnnotation,
    ):
        self._annotate = annotate
        self._ids = ids
        self._asked = asked = asked or Asked.nothing(len(ids))
        self._device = output.sampled_token_ids
        has_mask = output.sampling_mask is not None and asked.wants_mask.any()
        self._device_mask = output.sampling_mask if has_mask else None
        self._device_nans, self._device_failed = output.num_nans, output.failures(may_forbid=may_forbid)
        tokens = self._device if starts_copy else None
        for array in (tokens, self._device_mask, self._device_nans, self._device_failed):
            if array is not None:
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
        result = SampledOutput(
            self._ids,
            sampled,
            logprobs=None if self._device_logprobs is None else self._logprobs(sampled[:, 0] != NO_TOKEN),
            sampling_masks=None if self._device_mask is None else self._sampling_masks(sampled[:, 0] != NO_TOKEN),
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

    def _sampling_masks(self, has_token: np.ndarray) -> SamplingMaskLists:
        words = np.asarray(self._device_mask)[: len(has_token)]
        # Most words are 0 where a filter is on; only the others are taken apart.
        row, place = np.nonzero(np.where((self._asked.wants_mask & has_token)[:, None], words, 0))
        bits = np.unpackbits(words[row, place].astype("<u4")[:, None].view(np.uint8), axis=1, bitorder="little")
        entry, bit = np.nonzero(bits)
        token_ids = place[entry] * WORD + bit
        ends = np.bincount(row[entry], minlength=len(has_token)).cumsum()
        return SamplingMaskLists(token_ids.astype(np.int32), np.concatenate([[0], ends]).astype(np.int32))

    def _logprobs(self, has_token: np.ndarray) -> LogprobsLists:
        """The columns that each request asked for. has_token: bool[B], a token was sampled."""
        found = jax.tree.map(np.asarray, self._device_logprobs)
        return columns(found, self._asked.num_logprobs, self._asked.num_listed, has_token)

    def _num_nans(self) -> dict[str, int] | None:
        if self._device_nans is None:
            return None
        return dict(zip(self._ids.req_ids, np.asarray(self._device_nans).tolist(), strict=False))
