"""`SamplingParams`: what one request asks of the sampler."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.compile.buckets import Feature, Tier, lowest_tier
from jaxrunner.errors import AdmissionError, NotBuiltError
from jaxrunner.sampling.temperature import GREEDY_BELOW
from jaxrunner.structured_outputs import StructuredOutputsParams

NOT_BUILT_DEFAULTS: dict[str, Any] = {
    "n": 1,
}
"""Parameters of vLLM's class that are known but not built, with the value that asks for nothing."""

MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)


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
    logprobs: log-probabilities of each sampled token and of so many best ids, as many as the `max_logprobs` of
    RunnerConfig allows, -1 for all ids; None for none at all. logprob_token_ids: of these ids as well, or instead.
    prompt_logprobs, prompt_logprob_token_ids: the same of each token of the prompt but the first; such a request runs
    its whole prompt, without the prefix cache. `Reports` says of which numbers they are.
    repetition_penalty: above 0; logits of ids in the prompt or the output are divided by it if positive, else
    multiplied; 1 is off. frequency_penalty, presence_penalty: -2 to 2; subtracted for each time an id was sampled, and
    once if it was; 0 is off. logit_bias: id -> what is added to its logit. allowed_token_ids: all other ids are
    forbidden. bad_words: texts that are never completed, wherever tokens divide them; an engine turns them into
    bad_words_token_ids, sequences of ids whose last one is forbidden after the others.
    thinking_token_budget: most tokens of thinking, which is then ended; None or less than 0 for no bound. Needs the
    `thinking` of RunnerConfig. replay_token_ids: the first tokens of the output, whatever is drawn ("trace replay");
    log-probabilities are those of these tokens.
    return_sampling_mask: for each token the ids that it was drawn from, with a finite logit after constraints and
    filters. A request whose constraints leave no id at all ends with an error of its own.
    extra_args: for the user's logits processors and sampler (`jaxrunner.sampling.custom`): the name of each that is to
    serve this request -> {array name: value}, {} for its defaults.
    structured_outputs: what the output's text must look like; an engine masks every token's logits for it.
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
    logprob_token_ids: Sequence[int] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    thinking_token_budget: int | None = None
    replay_token_ids: Sequence[int] | None = None
    return_sampling_mask: bool = False
    extra_args: Mapping[str, Mapping[str, Any]] | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None

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
        self._check_penalties()
        self._check_lists()
        object.__setattr__(self, "extra_args", _extra_args(self.extra_args))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise AdmissionError(f"structured_outputs is {self.structured_outputs!r}, no StructuredOutputsParams")
        for name, nothing in NOT_BUILT_DEFAULTS.items():
            value = getattr(self, name)
            if value != nothing:
                raise NotBuiltError(f"SamplingParams.{name}={value!r} is not built yet; leave it at {nothing!r}")
            object.__setattr__(self, name, nothing)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def features(self) -> Feature:
        """All that is asked of the sampler."""
        lists = (self.logit_bias, self.allowed_token_ids, self.bad_words_token_ids, self.replay_token_ids)
        has_budget = self.thinking_token_budget is not None
        used = {
            Feature.DRAW: not self.is_greedy,
            Feature.FILTERS: not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0),
            Feature.CONSTRAINTS: bool(
                self.min_tokens or self.has_penalty or any(lists) or has_budget or self.extra_args
            ),
            Feature.LOGPROBS: self.logprobs is not None or self.logprob_token_ids is not None,
            Feature.SAMPLING_MASK: self.return_sampling_mask,
        }
        return functools.reduce(operator.or_, (feature for feature, asked in used.items() if asked), Feature(0))

    @property
    def scores_prompt(self) -> bool:
        """Whether something is asked of the prompt's own tokens."""
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def tier(self) -> Tier:
        """The lowest tier of the sampler that does all that is asked for."""
        return lowest_tier(self.features)

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
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not (_is_int(count) and count >= -1):
                raise AdmissionError(f"{name} is {count!r}; it must be 0 or more, -1 for all ids, or None for none")

    def _check_stopping(self) -> None:
        if not (_is_int(self.min_tokens) and self.min_tokens >= 0):
            raise AdmissionError(f"min_tokens is {self.min_tokens!r}; it must be an integer, 0 or more")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise AdmissionError(f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}")
        if not all(isinstance(text, str) and text for text in self.stop_strings):
            raise AdmissionError(f"stop is {self.stop!r}; it must be a non-empty string or a list of such")
        object.__setattr__(self, "stop", self.stop_strings or None)

    def _check_penalties(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise AdmissionError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0, 1 is off")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise AdmissionError(f"{name} is {getattr(self, name)}; it must lie in -2 to 2, 0 is off")
        budget = self.thinking_token_budget
        if budget is not None and not _is_int(budget):
            raise AdmissionError(f"thinking_token_budget is {budget!r}; it must be an integer, or None for no bound")
        # A budget that no context can reach is none.
        has_bound = budget is not None and 0 <= budget < MAX_INT32
        object.__setattr__(self, "thinking_token_budget", int(budget) if has_bound and budget is not None else None)

    def _check_lists(self) -> None:
        """What is empty becomes None, the rest tuples of int: nothing of the caller's is kept."""
        bias = dict(self.logit_bias or {})
        if not all(_is_int(t) and _is_finite_float32(value) for t, value in bias.items()):
            raise AdmissionError(f"logit_bias is {self.logit_bias!r}; it must map ids to finite float32 numbers")
        object.__setattr__(self, "logit_bias", {int(t): float(value) for t, value in bias.items()} or None)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            raise AdmissionError("allowed_token_ids is empty, so no id could be sampled; leave it at None for no limit")
        for name in ("allowed_token_ids", "replay_token_ids", "logprob_token_ids", "prompt_logprob_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)) or None)
        words = tuple(_ids("bad_words_token_ids", word) for word in self.bad_words_token_ids or ())
        if not all(words):
            raise AdmissionError("bad_words_token_ids holds a word without an id")
        has_words = self.bad_words_token_ids is not None
        object.__setattr__(self, "bad_words_token_ids", words if has_words else None)
        texts = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        if not all(isinstance(text, str) and text for text in texts):
            raise AdmissionError(f"bad_words is {self.bad_words!r}; it must be a list of non-empty strings")
        object.__setattr__(self, "bad_words", texts or None)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite_float32(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and abs(float(value)) <= MAX_FLOAT32


def _extra_args(given: Any) -> dict[str, dict[str, np.ndarray]] | None:
    """Copies of the values, which nobody can write into."""
    if not isinstance(given, Mapping | None) or not all(isinstance(v, Mapping) for v in (given or {}).values()):
        raise AdmissionError(f"extra_args is {given!r}; it must map the name of a logits processor to its arrays")
    found: dict[str, dict[str, np.ndarray]] = {}
    for owner, values in (given or {}).items():
        found[owner] = {}
        for name, value in values.items():
            try:
                array = np.array(value)
            except ValueError as error:
                raise AdmissionError(f"extra_args[{owner!r}][{name!r}] is no array: {error}") from error
            array.flags.writeable = False
            found[owner][name] = array
    return found or None


def _ids(name: str, ids: Sequence[int] | None) -> tuple[int, ...]:
    found = tuple(ids if ids is not None else ())
    if not all(map(_is_int, found)):
        raise AdmissionError(f"{name} is {ids!r}; it must be a list of integer token ids")
    return tuple(map(int, found))
