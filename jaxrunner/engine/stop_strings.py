"""Stop strings: where the text of a growing list of ids contains one, however the tokens divide it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrunner.models.stream_decoder import StreamDecoder
from jaxrunner.models.tokenizer import Tokenizer


class StopStrings:
    """stop: the strings; the one that begins first in the text counts, of several at one place the first listed.

    include: the text keeps the string that ended it. min_tokens: a string must reach past so many tokens to count.
    text: all text so far; once a string was found, the text that is left.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, include: bool = False, min_tokens: int = 0):
        self.text = ""
        self._stop = tuple(stop)
        self._include = include
        self._min_tokens = min_tokens
        self._decoder = StreamDecoder(tokenizer)
        self._num_ids = 0
        self._searched = 0  # no string that ends up to here counts any more
        self._found: str | None = None

    def update(self, ids: Sequence[int], *, search: bool = True) -> str | None:
        """Take all ids so far, the known ones included; the stop string in their text, or None. Nothing is read past
        the id that completes one. search: whether the new ids may complete one.
        """
        for token_id in ids[self._num_ids :]:
            if self._found is not None:
                break
            self.text += self._decoder.push([token_id])
            self._num_ids += 1
            if search and self._num_ids > self._min_tokens:
                self._find()
            self._searched = len(self.text)
        return self._found

    def close(self) -> None:
        """No id will follow: add what the decoder held back for a character that never came."""
        if self._found is None:
            self.text += self._decoder.flush()

    def visible(self) -> str:
        """The text that no later id can take back: without an end that may become a stop string."""
        if self._found is not None or self._include:
            return self.text
        held = max(_overlap(self.text, stop) for stop in self._stop)
        return self.text[: len(self.text) - held]

    def _find(self) -> None:
        places = [self.text.find(stop, max(0, self._searched + 1 - len(stop))) for stop in self._stop]
        found = [(place, order) for order, place in enumerate(places) if place >= 0]
        if found:
            place, order = min(found)
            self._found = self._stop[order]
            self.text = self.text[: place + (len(self._found) if self._include else 0)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
