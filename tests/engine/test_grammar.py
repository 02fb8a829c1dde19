"""Grammars on the host: what is allowed next, told by hand for a tokenizer of single bytes."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import tokenizers

from jaxrunner import StructuredOutputsParams
from jaxrunner.engine.grammar import fill_masks
from jaxrunner.engine.grammar_compiler import GrammarCompiler
from jaxrunner.errors import AdmissionError
from jaxrunner.models.tokenizer import Tokenizer
from tests.engine.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer, ids_of

TOKENIZER = byte_tokenizer()
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def allowed(grammar) -> str:
    """The characters that may follow, sorted; the end as "$"."""
    found = ids_of(fill_masks([grammar], VOCAB_SIZE // 32)[0])
    assert found <= set(range(EOS + 1)), "an id without a token is allowed"
    return "".join(sorted(TOKENIZER.decode([i]) for i in found - {EOS})) + "$" * (EOS in found)


def followed(compiler, text: str, **fields) -> list[str]:
    """What is allowed before each character of `text` and after the last."""
    grammar = compiler.start(StructuredOutputsParams(**fields))
    seen, output = [allowed(grammar)], []
    for token_id in ids(text):
        output.append(token_id)
        grammar.advance(output)
        seen.append(allowed(grammar))
    assert grammar.error is None
    assert grammar.num_tokens == len(output)
    return seen


@pytest.mark.parametrize(
    ("fields", "text", "expected"),
    [
        ({"choice": ["in", "inn", "out"]}, "inn", ["io", "n", "n$", "$"]),
        ({"regex": "a[bc]{1,2}"}, "abc", ["a", "bc", "bc$", "$"]),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, "(x)", ["(x", "(x", ")", "$"]),
        ({"grammar": 'start: "(" start ")" | "x"'}, "(x)", ["(x", "(x", ")", "$"]),
        (
            {"json": SCHEMA, "disable_any_whitespace": True},
            '{"a":22}',
            ["{", '"', "a", '"', ":", "12", "2", "}", "$"],
        ),
        ({"json": json.dumps(SCHEMA), "whitespace_pattern": "-?"}, '{"a"-:', ["{", '"-', "a", '"', "-:", ":", "-12"]),
        ({"json": {"type": "null"}}, "null", ["n", "u", "l", "l", "$"]),
    ],
)
def test_what_may_follow(compiler, fields, text, expected):
    assert followed(compiler, text, **fields) == expected


def test_any_json_object(compiler):
    first, second, *_ = followed(compiler, '{"k": [1]}', json_object=True)
    assert first == "{"
    assert {'"', "}", " "} <= set(second)
    assert followed(compiler, '{"k": [1]}', json_object=True)[-1] == "$"


def test_k073_the_mask_has_a_bit_for_the_largest_id():
    """Of 127,999 as the largest id: 128,000 ids, 4,000 words, the last bit of the last word is the end id's."""
    vocab = TOKENIZER.backend.get_vocab(with_added_tokens=False)
    vocab |= {f"a{i}": i for i in range(len(vocab), 127_999)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = Tokenizer(backend, eos_token_ids=(127_999,))
    assert tokenizer.vocab_size == 128_000
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
    grammar = compiler.start(StructuredOutputsParams(regex="a?"))
    (words,) = fill_masks([grammar], compiler.num_words)
    assert words.shape == (4_000,)
    assert ids_of(words) == {*ids("a"), 127_999}
    assert words[3_999] == np.uint32(1) << np.uint32(31)


def test_k075_a_cleared_compiler_and_that_of_another_tokenizer_compile_anew(compiler):
    params = StructuredOutputsParams(choice=["yes", "no"])
    compiler.clear()
    assert compiler.num_cached == 0
    one, two = compiler.start(params), compiler.start(StructuredOutputsParams(choice=("yes", "no")))
    assert compiler.num_cached == 1
    one.advance(ids("ye"))
    assert (allowed(one), allowed(two)) == ("s", "ny"), "what is kept is not what requests move on"
    compiler.clear()
    assert compiler.num_cached == 0
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.backend.to_str())
    backend.add_tokens(["yes"])
    other = GrammarCompiler(Tokenizer(backend), VOCAB_SIZE, (EOS,))
    (words,) = fill_masks([other.start(params)], compiler.num_words)
    assert ids_of(words) == {*ids("yn"), EOS + 1}
    assert (other.num_cached, compiler.num_cached) == (1, 0)


def test_without_an_end_id_the_grammar_is_over_when_nothing_may_follow(compiler):
    """ignore_eos: the end is never allowed; where the grammar may go on it does."""
    params = StructuredOutputsParams(regex="ab?c?")
    grammar = compiler.start(params, ignore_eos=True)
    seen = []
    for count in range(4):
        grammar.advance(ids("abc")[:count])
        seen.append((allowed(grammar) if not grammar.is_over else "", grammar.is_over))
    assert seen == [("a", False), ("bc", False), ("c", False), ("", True)]
    ends = compiler.start(params)
    ends.advance(ids("abc"))
    assert not ends.is_over, "its end id is still to come"
    assert allowed(ends) == "$"


def test_a_token_that_is_forbidden_is_an_error_that_names_it(compiler):
    grammar = compiler.start(StructuredOutputsParams(regex="ab*"))
    good = compiler.start(StructuredOutputsParams(regex="ab*"))
    output = ids("abx")
    grammar.advance(output)
    assert grammar.error == f"its grammar forbids token id {output[-1]} at position 2 of the output"
    grammar.advance([*output, *ids("b")])
    assert grammar.num_tokens == 4
    masks = fill_masks([grammar, None, good], VOCAB_SIZE // 32)
    assert (masks[:2] == ~np.uint32(0)).all(), "what cannot be judged forbids nothing"
    assert ids_of(masks[2]) == set(ids("a"))
    assert good.error is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(("}, r"regex cannot be compiled.*invalid regex.*unclosed group"),
        ({"regex": r"a(?=b)"}, "regex cannot be compiled"),
        ({"grammar": "start: nothing"}, "grammar cannot be compiled.*nothing"),
        ({"grammar": "root ::= ("}, r"grammar cannot be compiled.*GBNF"),
        ({"grammar": "neither of both"}, "grammar cannot be compiled"),
        ({"json": [1]}, "json cannot be compiled"),
        ({"json": {"type": "nonsense"}}, "json cannot be compiled.*nonsense"),
        ({"json": {"type": "array", "uniqueItems": True}}, "json cannot be compiled.*uniqueItems"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "json cannot be compiled.*[Uu]nsatisfiable"),
        ({"regex": "[^\x00-\U0010ffff]"}, "regex: .*no text of it"),
    ],
)
def test_a_grammar_that_is_none_is_refused_in_one_line(compiler, fields, message, capfd):
    with pytest.raises(AdmissionError, match=rf"structured_outputs\.{message}") as caught:
        compiler.start(StructuredOutputsParams(**fields))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_extra_is_named(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find_spec(name))
    with pytest.raises(AdmissionError, match=r"pip install 'jaxrunner\[structured\]'"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, (EOS,))


def test_tokenizers_that_cannot_be_followed_are_refused():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(AdmissionError, match=r"this model's tokenizer.*decoder"):
        GrammarCompiler(Tokenizer(words), VOCAB_SIZE, (1,))
    with pytest.raises(AdmissionError, match=r"\[250\].*241 ids"):
        GrammarCompiler(TOKENIZER, VOCAB_SIZE, (250,))
