"""One request inside the engine, from its arrival to its last token."""

from __future__ import annotations

import dataclasses

from jaxrunner.sampling_params import SamplingParams


@dataclasses.dataclass
class Request:
    """prompt: text, if it came as text. eos_token_ids: ids that end it unless params.ignore_eos.

    num_computed_tokens: tokens handed to the runner so far. blocks: allocator blocks per KV-cache group.
    finish_reason: None, "stop" (an end id; stop_reason says which of the user's, None for the model's own), "length"
    or "abort".
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    prompt: str | None = None
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    blocks: tuple[list[int], ...] = ()
    finish_reason: str | None = None
    stop_reason: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def max_tokens(self, max_model_len: int) -> int:
        """Most tokens it may generate: at least one, and no token past max_model_len is ever run."""
        room = max(1, max_model_len - len(self.prompt_token_ids))
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    def append(self, token_id: int, max_model_len: int) -> None:
        """Take a sampled token and decide whether it was the last."""
        self.output_token_ids.append(token_id)
        if token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        elif len(self.output_token_ids) >= self.max_tokens(max_model_len):
            self.finish_reason = "length"
