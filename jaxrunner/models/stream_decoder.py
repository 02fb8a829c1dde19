"""Text of a growing list of ids, handed out as soon as no later id can change it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxrunner.models.tokenizer import Tokenizer


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): byte for byte in kept} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class StreamDecoder:
    """Incremental `Tokenizer.decode`: the pieces of all `push` calls and `flush` joined equal `decode` of all ids.

    Byte-level tokenizers are decoded byte by byte, and only the bytes of an unfinished UTF-8 sequence are held back.
    Other tokenizers are decoded over a window, and text that ends in U+FFFD or in byte tokens is held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._byte_level = type(tokenizer.backend.decoder).__name__ == "ByteLevel"
        self._special = {i for i, token in tokenizer.backend.get_added_tokens_decoder().items() if token.special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._ids: list[int] = []  # window: text up to `_shown` is out already and only gives the context
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids; the text that has become final, possibly empty."""
        if self._byte_level:
            return self._utf8.decode(b"".join(self._bytes(int(i)) for i in ids))
        return "".join(self._push_one(int(i)) for i in ids)

    def flush(self) -> str:
        """The text still held back, when no further id will come."""
        if self._byte_level:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return text
        text = self._window_text()
        self._ids, self._shown = [], 0
        return text

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or (self._skip and token_id in self._special):
            return b""
        if all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()

    def _push_one(self, token_id: int) -> str:
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None or (self._skip and token_id in self._special):
            return ""
        self._ids.append(token_id)
        text = self._window_text()
        is_byte = len(token) == 6 and token.startswith("<0x")
        if not text or text.endswith("�") or is_byte:
            return ""
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return text

    def _window_text(self) -> str:
        """Text of the window after what is out already."""
        before = self._tokenizer.decode(self._ids[: self._shown], self._skip)
        return self._tokenizer.decode(self._ids, self._skip)[len(before) :]
