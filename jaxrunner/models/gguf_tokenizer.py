"""The tokenizer that a GGUF file's metadata describes: byte-level BPE with a named way to split text first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxrunner.errors import CheckpointError
from jaxrunner.models.generation import eos_token_ids
from jaxrunner.models.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENGLISH + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split_by(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_PRE: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _split_by(_LLAMA3),
    "qwen2": _split_by(_QWEN2),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The `Tokenizer` of a GGUF file.

    Raises `CheckpointError` for a kind of tokenizer, or a `tokenizer.ggml.pre`, that is not known exactly: a near miss
    would give wrong ids for some texts only.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    splitter = _PRE.get(str(pre))
    if kind != "gpt2" or splitter is None:
        raise CheckpointError(
            f"the GGUF tokenizer (model {kind!r}, pre {pre!r}) is not supported. Supported: model 'gpt2' with pre "
            f"{', '.join(map(repr, _PRE))}. Use the model's safetensors checkpoint, which has a tokenizer.json."
        )
    try:
        return _build(metadata, str(pre), splitter)
    except KeyError as error:
        raise CheckpointError(f"the GGUF file lacks {error}. Use a file with the whole tokenizer.") from error
    except Exception as error:  # the tokenizers package raises bare Exception
        raise CheckpointError(
            f"the GGUF file's tokenizer.ggml metadata is damaged ({type(error).__name__}: {error}). Download it again."
        ) from error


def _build(metadata: Mapping[str, Any], pre: str, splitter: Callable[[], pre_tokenizers.PreTokenizer]) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges: list[str] = metadata["tokenizer.ggml.merges"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitter()
    backend.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [t for t, token_type in zip(tokens, types, strict=True) if token_type == wanted]
        backend.add_tokens([tokenizers.AddedToken(token, normalized=False, special=special) for token in added])

    bos, eos = metadata.get("tokenizer.ggml.bos_token_id"), metadata.get("tokenizer.ggml.eos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=None, special_tokens=[(tokens[bos], bos)]
        )
    ids = {"bos_token": bos, "eos_token": eos, "unk_token": metadata.get("tokenizer.ggml.unknown_token_id")}
    return Tokenizer(
        backend,
        eos_token_ids=eos_token_ids(eos, metadata.get("tokenizer.ggml.eot_token_id")),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={name: tokens[i] for name, i in ids.items() if i is not None},
    )
