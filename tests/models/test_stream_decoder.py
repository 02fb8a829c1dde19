import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jaxrunner.models.default_model import default_model_path
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.gguf_tokenizer import tokenizer_from_gguf
from jaxrunner.models.stream_decoder import StreamDecoder
from jaxrunner.models.tokenizer import Tokenizer

from .checkpoints import GOLDEN
from .test_tokenizer import gguf_metadata

BYTE_LEVEL = tokenizer_from_gguf(gguf_metadata("gpt-2"))


def sentencepiece():
    """A Llama-2-like tokenizer: pieces with a leading blank, byte fallback, the first blank stripped."""
    pieces = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "▁Hello", "▁wörld", "lo", "�", "🙂"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return Tokenizer(backend)


SENTENCEPIECE = sentencepiece()


def streamed(tokenizer, chunks, **options):
    decoder = StreamDecoder(tokenizer, **options)
    return "".join([*[decoder.push(chunk) for chunk in chunks], decoder.flush()])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_joined_pieces_equal_decode(tokenizer, data, skip):
    ids = st.integers(0, tokenizer.vocab_size - 1)
    chunks = data.draw(st.lists(st.lists(ids, max_size=4), max_size=12))
    whole = tokenizer.decode([i for chunk in chunks for i in chunk], skip_special_tokens=skip)
    assert streamed(tokenizer, chunks, skip_special_tokens=skip) == whole


@given(text=st.text(st.sampled_from("aé€🙂 \n�"), max_size=12))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_text_arrives_as_soon_as_its_bytes_are_complete(text):
    decoder, shown = StreamDecoder(BYTE_LEVEL), ""
    for i in range(len(text)):
        shown += "".join(decoder.push([token]) for token in BYTE_LEVEL.encode(text[i]).ids)
        assert shown == text[: i + 1]


def test_incomplete_sequences_are_held_back_until_flush():
    decoder = StreamDecoder(BYTE_LEVEL)
    first, second, third = BYTE_LEVEL.encode("€").ids
    assert decoder.push([first, second]) == ""
    assert decoder.push([third]) == "€"
    assert decoder.push([first]) == ""
    assert decoder.flush() == "�"


def test_byte_fallback_run_is_held_back_because_a_later_byte_changes_it():
    letter, broken, word = (SENTENCEPIECE.backend.token_to_id(t) for t in ("<0x41>", "<0xFF>", "lo"))
    decoder = StreamDecoder(SENTENCEPIECE)
    assert decoder.push([letter]) == ""
    assert decoder.push([broken, word]) == "��lo"
    assert decoder.push([letter]) + decoder.flush() == "A"


@pytest.mark.smollm2
def test_golden_texts():
    tokenizer = tokenizer_from_gguf(GGUFFile.open(default_model_path()).metadata)
    for case in json.loads((GOLDEN / "smollm2" / "tokenizer.json").read_text()):
        pieces = [[i] for i in case["ids"]]
        assert streamed(tokenizer, pieces, skip_special_tokens=False) == case["decoded"]
