"""A tokenizer of single bytes, and the tiny golden model with it: what a grammar allows can be told by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from jaxrunner.models.tokenizer import Tokenizer
from tests.conftest import GOLDEN
from tests.models.test_tokenizer import byte_level_backend

EOS = 240
"""Id of the tokenizer's one special token, and its largest id; the model's vocabulary has 256."""
VOCAB_SIZE = 256


def byte_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), eos_token_ids=(EOS,))


def with_byte_tokenizer(target: Path) -> str:
    """A checkpoint at `target`."""
    shutil.copytree(GOLDEN / "tiny" / "llama", target)
    byte_level_backend().save(str(target / "tokenizer.json"))
    config = json.loads((target / "config.json").read_text()) | {"eos_token_id": EOS}
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").unlink(missing_ok=True)
    return str(target)


def ids_of(words: np.ndarray) -> set[int]:
    """The ids whose bits are set."""
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())
