"""`SamplingMetadata`: what sampling needs to know of the batch, made anew only when the batch has changed."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.host_runner.row_fields import RowBank
from jaxrunner.runner.output import Asked, BatchIds
from jaxrunner.state.fields import SAMPLING_COLUMN


@dataclasses.dataclass(frozen=True)
class SamplingMetadata:
    """Of the B scheduled rows. ids: their requests. tier: the sampler that serves all of them. params: i32[B, P].
    prompt_len, number: i32[B]. is_structured: bool[B]. asked: what goes into the output beside tokens.
    """

    ids: BatchIds
    tier: Tier
    params: np.ndarray
    prompt_len: np.ndarray
    number: np.ndarray
    is_structured: np.ndarray
    asked: Asked

    @property
    def num_reqs(self) -> int:
        return len(self.prompt_len)

    @classmethod
    def of(cls, rows: RowBank, num_reqs: int) -> SamplingMetadata:
        """A copy of what the first `num_reqs` rows hold."""
        features = rows.sampling[:num_reqs, SAMPLING_COLUMN["features"]]
        return cls(
            ids=BatchIds(rows.req_ids[:num_reqs].tolist()),
            tier=lowest_tier(int(np.bitwise_or.reduce(features))),
            params=rows.sampling[:num_reqs].copy(),
            prompt_len=rows.prompt_len[:num_reqs].copy(),
            number=rows.number[:num_reqs].copy(),
            is_structured=rows.is_structured[:num_reqs] == 1,
            asked=Asked(
                num_logprobs=rows.num_logprobs[:num_reqs].copy(),
                num_listed=rows.num_listed[:num_reqs].copy(),
                wants_mask=(features & Feature.SAMPLING_MASK) > 0,
            ),
        )
