"""From `StructuredOutputsParams` to a `Grammar`, by llguidance."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxrunner.engine.grammar import Grammar, fill_masks, in_one_line
from jaxrunner.errors import AdmissionError
from jaxrunner.models.tokenizer import Tokenizer
from jaxrunner.sampling.packed_bits import num_words
from jaxrunner.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    import llguidance

MAX_CACHED = 64
"""Compiled grammars that are kept: equal ones of many requests are compiled once."""


class GrammarCompiler:
    """Grammars over one tokenizer.

    vocab_size: of the model; ids that the tokenizer lacks are never allowed. eos_token_ids: the model's, which end an
    output. Raises AdmissionError, with the way out, where llguidance is missing or cannot take the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        if importlib.util.find_spec("llguidance") is None:
            raise AdmissionError("structured outputs need llguidance: pip install 'jaxrunner[structured]'")
        from llguidance import LLTokenizer

        self.tokenizer = tokenizer
        self.num_words = num_words(vocab_size)
        self._end_ids = [i for i in eos_token_ids if i < tokenizer.vocab_size]
        if not self._end_ids:
            raise AdmissionError(
                f"structured outputs need an id that ends a text; of the model's, {list(eos_token_ids)}, its tokenizer "
                f"of {tokenizer.vocab_size} ids has none"
            )
        try:
            self._ids = LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=self._end_ids)
        except ValueError as error:
            raise AdmissionError(f"llguidance cannot take this model's tokenizer: {in_one_line(str(error))}") from error
        self._compiled = functools.lru_cache(MAX_CACHED)(self._compile)

    @property
    def num_cached(self) -> int:
        return self._compiled.cache_info().currsize

    def clear(self) -> None:
        """Forget every compiled grammar."""
        self._compiled.cache_clear()

    def start(self, params: StructuredOutputsParams, *, ignore_eos: bool = False) -> Grammar:
        """The grammar of an output that has no token yet. Raises AdmissionError for one that is malformed, that
        llguidance does not know in full, or that no text matches.
        """
        grammar = Grammar(self._compiled(params).deep_copy(), self._end_ids, may_end=not ignore_eos)
        fill_masks([grammar], self.num_words)
        if grammar.error is not None:
            raise AdmissionError(f"structured_outputs.{params.kind}: {grammar.error}")
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            limits = LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(self._ids, _source(params), log_level=0, limits=limits)
            error = matcher.get_error()
        except ValueError as raised:
            error = str(raised)
        if error:
            raise AdmissionError(f"structured_outputs.{params.kind} cannot be compiled: {in_one_line(error)}")
        return matcher


def _source(params: StructuredOutputsParams) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher, grammar_from

    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        return grammar_from("grammar", params.grammar)
    if params.choice is not None:
        return grammar_from("choice", json.dumps(params.choice))
    return LLMatcher.grammar_from_json_schema(
        '{"type": "object"}' if params.json is None else str(params.json),
        defaults={
            "whitespace_flexible": not params.disable_any_whitespace,
            "whitespace_pattern": params.whitespace_pattern,
        },
    )
