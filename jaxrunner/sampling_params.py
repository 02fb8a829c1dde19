"""`SamplingParams`: what one request asks of the sampler."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

from jaxrunner.compile.buckets import Tier
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.sampling.logprobs import MAX_LOGPROBS
from jaxrunner.sampling.temperature import GREEDY_BELOW

NOT_BUILT_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "structured_outputs": None,
}
"""Parameters of vLLM's class that are known but not built, with the value that asks for nothing."""

EQUAL_TO_NOTHING: dict[str, tuple[Any, ...]] = {"bad_words": (None, [], ())}
MAX_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's.

    temperature: 0 is greedy. seed: up to 64 bits; None takes one from the engine. max_tokens: most tokens to
    generate; None for as many as the context holds. ignore_eos: do not stop at the model's end ids.
    stop_token_ids: further ids that end a request; the id itself is part of the output.
    top_k: draw from the k best ids; 0 or less, or the vocabulary's size or more, is off. top_p: draw from the fewest
    best ids that hold this mass, above 0; 1 is off. min_p: draw from ids at least so probable relative to the best; 0
    is off. They apply in the order of `jaxrunner.sampling`, and not to greedy requests.
    min_tokens: no end id (the model's unless ignore_eos, and stop_token_ids) is sampled and no stop string is looked
    for before so many tokens. stop: strings that end a request wherever they begin and end within tokens; the text is
    cut before the string, or after it with include_stop_str_in_output. Strings are the engine's, a runner ignores them.
    logprobs: log-probabilities of each sampled token and of so many best ones, 0 to 20; None for none at all.
    The remaining parameters are accepted only with the value that asks for nothing: anything else raises
    NotBuiltError, so that no option is silently ignored.
    """

    temperature: float = 1.0
    max_tokens: int | None = 16
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
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
        self._check_filters()
        self._check_stopping()
        for name, nothing in NOT_BUILT_DEFAULTS.items():
            value = getattr(self, name)
            if value != nothing and value not in EQUAL_TO_NOTHING.get(name, ()):
                raise NotBuiltError(f"SamplingParams.{name}={value!r} is not built yet; leave it at {nothing!r}")
            object.__setattr__(self, name, nothing)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def tier(self) -> Tier:
        """The lowest tier of the sampler that does all that is asked for."""
        if self.logprobs is not None:
            return "logprobs"
        has_filter = not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        if has_filter or self.min_tokens:
            return "filtered"
        return "greedy" if self.is_greedy else "random"

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty for none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _check_filters(self) -> None:
        if not _is_int(self.top_k):
            raise AdmissionError(f"top_k is {self.top_k!r}; it must be an integer, 0 or less for off")
        # A larger k than 32 bits hold is off as well: no vocabulary has so many ids.
        object.__setattr__(self, "top_k", int(self.top_k) if 0 < self.top_k <= MAX_INT32 else 0)
        if not 0 < self.top_p <= 1:
            raise AdmissionError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            raise AdmissionError(f"min_p is {self.min_p}; it must lie in 0 (off) to 1")
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise AdmissionError(f"logprobs is {self.logprobs!r}; it must be 0 to {MAX_LOGPROBS}, or None for none")

    def _check_stopping(self) -> None:
        if not (_is_int(self.min_tokens) and self.min_tokens >= 0):
            raise AdmissionError(f"min_tokens is {self.min_tokens!r}; it must be an integer, 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise AdmissionError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise AdmissionError(f"stop is {self.stop!r}; it must be a non-empty string or a list of such")
        object.__setattr__(self, "stop", self.stop_strings or None)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
