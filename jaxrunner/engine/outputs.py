"""What a caller of the engine gets back. Names are vLLM's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class CompletionOutput:
    """text: decoded token_ids without special tokens. finish_reason: None while it runs, else "stop", "length" or
    "abort". stop_reason: the stop id of the user's that ended it, None for the model's own end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclasses.dataclass
class RequestOutput:
    """prompt: None when the request came as token ids. outputs: one completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
