"""`SamplingParams`: what one request asks of the sampler."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.sampling.sampler import GREEDY_BELOW

NOT_BUILT_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": None,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}
"""Parameters of vLLM's class that are known but not built, with the value that asks for nothing."""

EQUAL_TO_NOTHING: dict[str, tuple[Any, ...]] = {"top_k": (-1, 0), "stop": (None, [], ()), "bad_words": (None, [], ())}


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's.

    temperature: 0 is greedy. seed: up to 64 bits; None takes one from the engine. max_tokens: most tokens to
    generate; None for as many as the context holds. ignore_eos: do not stop at the model's end ids.
    stop_token_ids: further ids that end a request; the id itself is part of the output.
    The remaining parameters are accepted only with the value that asks for nothing: anything else raises
    NotBuiltError, so that no option is silently ignored.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: str | Sequence[str] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise AdmissionError(f"temperature is {self.temperature}; it must be a finite number, 0 or more")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise AdmissionError(f"max_tokens is {self.max_tokens}; it must be at least 1, or None for no limit")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise AdmissionError(f"seed {self.seed} does not fit 64 bits")
        for name, nothing in NOT_BUILT_DEFAULTS.items():
            value = getattr(self, name)
            if value != nothing and value not in EQUAL_TO_NOTHING.get(name, ()):
                raise NotBuiltError(f"SamplingParams.{name}={value!r} is not built yet; leave it at {nothing!r}")
            object.__setattr__(self, name, nothing)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW
