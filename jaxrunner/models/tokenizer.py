"""`Tokenizer`: text to ids and back, chat prompts, and the ids that end a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxrunner.errors import AdmissionError, CheckpointError
from jaxrunner.models import chat_template as chat
from jaxrunner.models.generation import eos_token_ids, read_generation_config, read_json


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a checkpoint says about its use.

    eos_token_ids: ids that end a generation, ascending: the union of generation configuration, configuration and
        tokenizer.
    chat_template: Jinja text, or None.
    vocab_size: one more than the largest id, added tokens included.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        backend.no_truncation()
        backend.no_padding()

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer of a Hugging Face directory, None where it has none.

        `tokenizer.json` alone decides how text is split; `tokenizer_class` never replaces any of it. Raises
        `CheckpointError` for files that cannot be read.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise CheckpointError(f"{path} cannot be read ({error}). Download it again.") from error
        settings = _optional_json(directory / "tokenizer_config.json")
        special = _special_tokens(_optional_json(directory / "special_tokens_map.json") | settings)
        eos = eos_token_ids(
            read_generation_config(directory).get("eos_token_id"),
            _optional_json(directory / "config.json").get("eos_token_id"),
            backend.token_to_id(special["eos_token"]) if "eos_token" in special else None,
        )
        template = _template(directory, settings)
        return cls(backend, eos_token_ids=eos, chat_template=template, special_tokens=special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """The encoding of `text`; `.ids` is the list of token ids.

        add_special_tokens: add what the checkpoint puts around a text (a leading BOS in Llama's). Pass False for a text
        from `apply_chat_template`, which has them already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for `messages`; encode it with `add_special_tokens=False`.

        variables: further names the template can see (`tools`, `enable_thinking`, ...). Raises `AdmissionError` for a
        checkpoint without a template and for messages that the template refuses.
        """
        if self.chat_template is None:
            raise AdmissionError("this checkpoint has no chat template. Pass a prompt, or set tokenizer.chat_template.")
        names = self.special_tokens | {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        return chat.render(self.chat_template, messages, **(names | variables))


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise `CheckpointError` where the tokenizer has ids for which the model has no embedding."""
    if tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model's vocabulary only {vocab_size}: they do not "
            "belong together. Use the tokenizer of this checkpoint."
        )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... as text; a file may hold the text or a dictionary with it."""
    found = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                found[name] = content
    return found


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or _optional_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, Mapping) for entry in template):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{directory}: chat_template must be a text or a list of named ones. Correct it.")
    return template
