"""What a caller of the engine gets back. Names are vLLM's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Logprob:
    """logprob: natural logarithm of the model's own probability, or what else `Reports.logprobs_mode` says. rank: 1 for
    the best, None for an id that was named in logprob_token_ids and is not among the best that were asked for.
    decoded_token: None where the model has no tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    """text: decoded token_ids without special tokens, cut at a stop string. finish_reason: None while it runs, else
    "stop", "length", "abort" or "error"; error: what went wrong with this request alone. stop_reason: the stop id or
    stop string of the user's that ended it, None for the model's own end. logprobs: for each token the sampled id, then
    the best ids, then those named; None if not asked for. cumulative_logprob: of all sampled tokens. sampling_mask: for
    each token the ids it was drawn from, ascending; None if not asked for."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    sampling_mask: list[list[int]] | None = None
    error: str | None = None


@dataclasses.dataclass
class RequestOutput:
    """prompt: None when the request came as token ids. outputs: one completion. prompt_logprobs: for each token of the
    prompt itself, the best ids; prompt_token_id_logprobs: id -> log-probability of the ids named. The first token,
    which nothing stands before, has None in both; they are None altogether if not asked for, and shorter before they
    are complete."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: list[dict[int, float] | None] | None = None
