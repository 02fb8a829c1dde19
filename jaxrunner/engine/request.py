"""One request inside the engine, from its arrival to its last token."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrunner.engine.grammar import Grammar
from jaxrunner.engine.outputs import Logprob
from jaxrunner.engine.prefix_hash import HashChain
from jaxrunner.engine.stop_strings import StopStrings
from jaxrunner.sampling_params import SamplingParams


@dataclasses.dataclass
class Request:
    """prompt: text, if it came as text. eos_token_ids: ids that end it unless params.ignore_eos. priority: lower runs
    first; equal ones in order of arrival. seed: used when params.seed is None; fixed at arrival so that a preempted
    request goes on with the same draws. cache_salt: requests share KV prefixes only with others of the same salt.

    output_token_ids: what it has generated so far; for a running request the engine's columns are ahead of it until
    `Scheduler.sync`. finish_reason: None, "stop" (an end id or string; stop_reason says which of the user's, None for
    the model's own), "length", "abort" or "error" (error says what). stops: looks for its stop strings, if it has some.
    grammar: of its structured_outputs, in the state that its output has come to.
    logprobs, sampling_mask: one entry a token, None if not asked for. prompt_logprobs, prompt_token_id_logprobs: one
    entry a token of the prompt once they have arrived, before that only the first one's None. num_cached_tokens: prompt
    tokens taken from the prefix cache at first admission. hash_chain: of its tokens, made by the scheduler when prefix
    caching needs it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    prompt: str | None = None
    priority: int = 0
    seed: int = 0
    cache_salt: str | None = None
    arrival: int = 0
    output_token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    stops: StopStrings | None = None
    grammar: Grammar | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    sampling_mask: list[list[int]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: list[dict[int, float] | None] | None = None
    error: str | None = None
    hash_chain: HashChain | None = None
    _known: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def known_token_ids(self) -> np.ndarray:
        """i32[num_tokens], prompt and output; made anew only when it has grown."""
        if self._known is None or len(self._known) != self.num_tokens:
            self._known = np.array(self.prompt_token_ids + self.output_token_ids, np.int32)
        return self._known

    @property
    def order(self) -> tuple[int, int]:
        """Requests run in ascending order of this; the last is preempted first."""
        return self.priority, self.arrival

    def max_tokens(self, max_model_len: int) -> int:
        """Most tokens it may generate: at least one, and no token past max_model_len is ever run."""
        room = max(1, max_model_len - len(self.prompt_token_ids))
        return room if self.params.max_tokens is None else min(self.params.max_tokens, room)

    @property
    def seeded_params(self) -> SamplingParams:
        """The parameters with a seed, the same at every (re)admission."""
        return self.params if self.params.seed is not None else dataclasses.replace(self.params, seed=self.seed)

    @property
    def runs_whole_prompt(self) -> bool:
        """Whether cached KV of its prompt is of no use: each of its tokens still has to be scored."""
        scores = (self.prompt_logprobs, self.prompt_token_id_logprobs)
        return any(given is not None and len(given) < len(self.prompt_token_ids) for given in scores)

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end it."""
        own = [] if self.params.ignore_eos else list(self.eos_token_ids)
        return list(dict.fromkeys(own + list(self.params.stop_token_ids)))

    def finish(self, token_id: int) -> None:
        """Note why the request ended with `token_id`."""
        if token_id in self.params.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif token_id in self.eos_token_ids and not self.params.ignore_eos:
            self.finish_reason = "stop"
        else:
            self.finish_reason = "length"
