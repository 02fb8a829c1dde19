"""Lists that a request may bring to the sampler (ids, biases, words, a trace), as columns of one array of fixed width.

How many entries each list may have is part of the state, so that a request which brings more is refused at admission,
with the option that makes room for it, and nothing can run out in the middle of a run. A list takes no vocabulary-wide
table, and all of them together are one leaf of the state, because each leaf costs time at every dispatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.sampling_params import SamplingParams

NO_WRITES = np.zeros((0, 2), np.int32)
NO_IDS = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class ListSizes:
    """Most entries of each list of one request. Words: the tokens of all bad words of a request together."""

    stop_ids: int = 64
    logit_bias: int = 300
    allowed_token_ids: int = 1024
    bad_words_tokens: int = 256
    logprob_token_ids: int = 128
    prompt_logprob_token_ids: int = 128
    replay_tokens: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 1 if field.name == "stop_ids" else 0
            if getattr(self, field.name) < least:
                raise AdmissionError(f"{field.name} of {self} must be at least {least}")

    @property
    def columns(self) -> dict[str, slice]:
        """Name -> its columns. Ids are stored as id + 1, so that 0 is unused; biases as the bits of a float32.

        bad_word_place: of a word's last token minus the number of tokens before it, of the others the distance to it.
        """
        widths = {
            "stop_ids": self.stop_ids,
            "bias_ids": self.logit_bias,
            "bias_values": self.logit_bias,
            "allowed_ids": self.allowed_token_ids,
            "bad_word_ids": self.bad_words_tokens,
            "bad_word_place": self.bad_words_tokens,
            "logprob_ids": self.logprob_token_ids,
            "prompt_logprob_ids": self.prompt_logprob_token_ids,
            "replay_ids": self.replay_tokens,
        }
        ends = np.cumsum([*widths.values()]).tolist()
        return {name: slice(end - width, end) for (name, width), end in zip(widths.items(), ends, strict=True)}

    @property
    def width(self) -> int:
        """Columns of all lists together."""
        return self.columns["replay_ids"].stop


DEFAULT_LIST_SIZES = ListSizes()


def list_writes(params: SamplingParams, eos_token_ids: Sequence[int], sizes: ListSizes) -> np.ndarray:
    """i32[N, 2], (column, word): what a row's lists hold beside zeros. The parameters have passed `check_lists`."""
    bias, words = params.logit_bias or {}, params.bad_words_token_ids or ()
    lists: dict[str, np.ndarray] = {
        "stop_ids": _ids(masked_stop_ids(params, eos_token_ids)),
        "bias_ids": _ids(bias),
        "bias_values": np.fromiter(bias.values(), np.float32, len(bias)).view(np.int32) if bias else NO_IDS,
        "allowed_ids": _ids(params.allowed_token_ids or ()),
        "bad_word_ids": _ids([token for word in words for token in word]),
        "bad_word_place": np.array([p for word in words for p in _places(len(word))], np.int32) if words else NO_IDS,
        "logprob_ids": _ids(params.logprob_token_ids or ()),
        "prompt_logprob_ids": _ids(params.prompt_logprob_token_ids or ()),
        "replay_ids": _ids(params.replay_token_ids or ()),
    }
    parts = []
    for name, words32 in lists.items():
        if len(words32):
            start = sizes.columns[name].start
            parts.append(np.stack([np.arange(start, start + len(words32), dtype=np.int32), words32], axis=1))
    return np.concatenate(parts) if parts else NO_WRITES


def masked_stop_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> list[int]:
    """Ids that may not be sampled before min_tokens: the model's end ids (unless ignore_eos) and the request's own."""
    if not params.min_tokens:
        return []
    eos = [] if params.ignore_eos else eos_token_ids
    return list(dict.fromkeys([*eos, *params.stop_token_ids]))


def check_lists(
    params: SamplingParams,
    eos_token_ids: Sequence[int],
    *,
    vocab_size: int,
    sizes: ListSizes,
    has_thinking: bool = False,
    where: str = "request",
) -> None:
    """Raises AdmissionError for an id outside the vocabulary, a list that is longer than a row of the state holds, or
    a thinking budget where nothing says what thinking is."""
    if params.thinking_token_budget is not None and not has_thinking:
        raise AdmissionError(
            f"{where}: thinking_token_budget needs the ids around the model's thinking; start with "
            "thinking=ThinkingTokens(start=..., end=...) (of RunnerConfig, LLM and init_state)"
        )
    if params.bad_words and params.bad_words_token_ids is None:
        raise AdmissionError(f"{where}: bad_words are text, which an engine encodes; here, give bad_words_token_ids")
    words = params.bad_words_token_ids or ()
    named = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words_token_ids": [token for word in words for token in word],
        "logprob_token_ids": params.logprob_token_ids or (),
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids or (),
        "replay_token_ids": params.replay_token_ids or (),
    }
    for name, ids in named.items():
        if bad := [t for t in ids if not 0 <= t < vocab_size]:
            raise AdmissionError(f"{where}: {name} holds {bad[0]}, which is outside the vocabulary 0..{vocab_size - 1}")
    stop_ids = masked_stop_ids(params, eos_token_ids)
    _check_room(where, "stop_ids", "stop ids that min_tokens has to mask", len(stop_ids), sizes.stop_ids)
    for size, name in {
        "logit_bias": "logit_bias",
        "allowed_token_ids": "allowed_token_ids",
        "bad_words_tokens": "bad_words_token_ids",
        "logprob_token_ids": "logprob_token_ids",
        "prompt_logprob_token_ids": "prompt_logprob_token_ids",
        "replay_tokens": "replay_token_ids",
    }.items():
        _check_room(where, size, f"ids in {name}", len(named[name]), getattr(sizes, size))


def _check_room(where: str, size: str, what: str, count: int, room: int) -> None:
    if count > room:
        raise AdmissionError(
            f"{where}: {count} {what}, a row holds {room}; give fewer, or start with "
            f"list_sizes=ListSizes({size}={count}) (of RunnerConfig, LLM and init_state)"
        )


def _ids(ids: Collection[int]) -> np.ndarray:
    """As the state holds them: id + 1."""
    return (np.fromiter(ids, np.int64) + 1).astype(np.int32) if ids else NO_IDS


def _places(length: int) -> list[int]:
    return [*range(length - 1, 0, -1), 1 - length]
