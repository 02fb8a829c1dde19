"""`load`: a model, its weights and its tokenizer from a path, a hub id, or the embedded default model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrunner.errors import CheckpointError
from jaxrunner.models import gguf_loader, safetensors_loader
from jaxrunner.models.config import model_from_config
from jaxrunner.models.default_model import default_model_path
from jaxrunner.models.generation import eos_token_ids, read_generation_config, read_json
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.gguf_tokenizer import tokenizer_from_gguf
from jaxrunner.models.model import Layout, Model
from jaxrunner.models.tokenizer import Tokenizer, check_vocab

HUB_FILES = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def load(
    source: str | Path | None = None, *, dtype: str = "float32", layout: Layout = "layers"
) -> tuple[Model, dict[str, Any], Tokenizer | None]:
    """A model, its weights, and its tokenizer (None where the checkpoint has none).

    source: a Hugging Face directory, a `.gguf` file, a hub id (safetensors and JSON files are downloaded, never
        pickles), or None for the embedded default model, SmolLM2-135M-Instruct.
    dtype: of weights and activations; `"auto"` is the checkpoint's own (float32 for a quantised GGUF file).
    layout: see `Model`.

    `model.eos_token_ids` is the union of what configuration, generation configuration and tokenizer name;
    `model.kv_scales` are those of an fp8 KV cache, where the files have any;
    `model.num_token_ids` is the number of ids of the tokenizer where the output has more rows than that.
    Raises `CheckpointError`, before weights are read wherever that is possible.
    """
    model, tokenizer, read_weights = _opened(source, dtype, layout)
    return model, read_weights(), tokenizer


def describe(source: str | Path | None = None, *, dtype: str = "float32", layout: Layout = "layers") -> Model:
    """The model of `load` alone: no weight is read, and a directory need not hold any."""
    return _opened(source, dtype, layout)[0]


Opened = tuple[Model, Tokenizer | None, Callable[[], dict[str, Any]]]


def _opened(source: str | Path | None, dtype: str, layout: Layout) -> Opened:
    path = default_model_path() if source is None else locate(source)

    def explained(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except CheckpointError as error:
            if str(path) in str(error):
                raise
            raise CheckpointError(f"{path}: {error}") from error

    model, tokenizer, read_weights = explained(lambda: _open(path, dtype, layout))
    return model, tokenizer, lambda: explained(read_weights)


def _open(path: Path, dtype: str, layout: Layout) -> Opened:
    if path.is_file():
        file = GGUFFile.open(path)
        config = gguf_loader.config_from_gguf(file)
        model, tokenizer = _described(config, {}, tokenizer_from_gguf(file.metadata), dtype, layout)
        return model, tokenizer, lambda: gguf_loader.load_weights(model, file)
    config, generation = read_json(path / "config.json"), read_generation_config(path)
    model, tokenizer = _described(config, generation, Tokenizer.from_directory(path), dtype, layout)
    if any(path.glob("*.safetensors")):
        model = model.replace(kv_scales=safetensors_loader.load_kv_scales(model, path))
    return model, tokenizer, lambda: safetensors_loader.load_weights(model, path)


def _described(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer | None, dtype: str, layout: Layout
) -> tuple[Model, Tokenizer | None]:
    """The model with the fields that come from its surroundings."""
    model = model_from_config(config, dtype=dtype, layout=layout)
    eos = eos_token_ids(
        config.get("eos_token_id"), generation.get("eos_token_id"), tokenizer.eos_token_ids if tokenizer else None
    )
    model = dataclasses.replace(model, eos_token_ids=eos)
    if tokenizer is not None:
        check_vocab(tokenizer, model.vocab_size)
        tokenizer.eos_token_ids = eos
        if tokenizer.vocab_size < model.vocab_size:
            model = dataclasses.replace(model, num_token_ids=tokenizer.vocab_size)
    return model, tokenizer


def locate(source: str | Path) -> Path:
    """The local directory or `.gguf` file of `source`; a hub id is downloaded to the hub's own cache."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is no .gguf file. Pass a .gguf file or the directory with config.json.")
        return path
    if path.suffix in (".gguf", ".safetensors") or not _HUB_ID.fullmatch(str(source)):
        raise CheckpointError(f"{source} does not exist, and is no hub id. Pass a directory, a .gguf file or a hub id.")
    return _from_hub(str(source))


def _from_hub(repository: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(repository, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"])
        )
    except Exception as error:  # the hub's client raises its own and its HTTP library's errors
        raise CheckpointError(
            f"{repository!r} is no local path and could not be fetched from the hub "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}). "
            "Check the name, the network and, for gated models, `hf auth login`; or download it elsewhere and pass the "
            "directory."
        ) from error
