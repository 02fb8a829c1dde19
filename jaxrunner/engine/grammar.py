"""One request's grammar: where its output stands in it, and which ids may follow."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrunner.sampling.packed_bits import WORD

if TYPE_CHECKING:
    import llguidance


class Grammar:
    """It lives on the host and follows the output's tokens as they arrive, so a preemption changes nothing of it.

    matcher: of the output's beginning; it belongs to this object. end_ids: ids that end the output where the grammar
    lets it end. may_end: False for a request that no id ends (ignore_eos): it is over when the grammar is.
    num_tokens: tokens of the output that were taken. error: why no further token can be judged, or None.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: Sequence[int], *, may_end: bool = True):
        self.matcher = matcher
        self.num_tokens = 0
        self.error: str | None = None
        self._end_ids = np.array(end_ids, np.int64)
        self._may_end = may_end

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take what is new in the output, a list that grows. A token that the grammar forbids is an error: one of a
        damaged row, or one that the request's trace brought."""
        for token_id in token_ids[self.num_tokens :]:
            if self.error is None and not self.matcher.consume_token(token_id):
                self.error = f"its grammar forbids token id {token_id} at position {self.num_tokens} of the output"
            self.num_tokens += 1

    @property
    def is_over(self) -> bool:
        """Whether the output is complete and no end id will say so."""
        return self.error is None and not self._may_end and self.matcher.is_stopped()

    def settle(self, words: np.ndarray) -> None:
        """Complete a mask that the matcher has filled, u32[W]. Sets `error` where there is nothing to go on with."""
        matcher = self.matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = in_one_line(matcher.get_error())
            if not reason or reason.startswith("NoExtension"):
                reason = "no text of it begins like this"
            self.error = f"its grammar cannot be followed: {reason}"
        elif not self._may_end:
            words[self._end_ids // WORD] &= ~(np.uint32(1) << (self._end_ids % WORD).astype(np.uint32))


def fill_masks(grammars: Iterable[Grammar | None], num_words: int) -> np.ndarray:
    """u32[n, num_words], the ids that may follow, see `sampling.packed_bits`; ids without a token may not. All may
    where there is no grammar, or one that is found to be in error, which its `error` then says.

    The masks of several grammars are filled in parallel, without Python's lock.
    """
    from llguidance.numpy import fill_next_token_bitmask_par

    given = list(grammars)
    masks = np.zeros((len(given), num_words), np.uint32)
    sound = [(grammar, i) for i, grammar in enumerate(given) if grammar is not None and grammar.error is None]
    if sound:
        fill_next_token_bitmask_par(_executor(), [(grammar.matcher, i) for grammar, i in sound], masks.view(np.int32))
    for grammar, i in sound:
        grammar.settle(masks[i])
    masks[[i for i, grammar in enumerate(given) if grammar is None or grammar.error is not None]] = ~np.uint32(0)
    return masks


def in_one_line(text: str) -> str:
    """What llguidance says without its drawings."""
    first, *others = text.strip().splitlines() or [""]
    return " ".join([first, *(line.strip() for line in others if line.startswith("error:"))])


@functools.cache
def _executor() -> llguidance.LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()
