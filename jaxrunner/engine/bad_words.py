"""Bad words: from texts to the sequences of ids that write them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxrunner.models.tokenizer import Tokenizer


def bad_words_token_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Each word as it is written at the start of a text and within one, after a space, each sequence once.

    Special tokens are left out: an id that begins every text would keep the sequence from ever being found. A word
    that is a part of longer tokens (its beginning lies inside of another one) is not found, as in vLLM.
    """
    spelled = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
    encoded = [tuple(tokenizer.encode(form, add_special_tokens=False).ids) for form in spelled]
    return [list(ids) for ids in dict.fromkeys(encoded) if ids]
