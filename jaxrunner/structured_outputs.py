"""`StructuredOutputsParams`: what the text of a request's output must look like."""

from __future__ import annotations

import dataclasses
import json as json_text
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrunner.errors import AdmissionError

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of the first five; names and meanings are vLLM's. The output as a whole must match, and then ends.

    json: a JSON schema, as text or as the value that this text stands for. regex: of the Rust crate `regex`, in
    which \\d, \\w and \\s mean those of all scripts. choice: texts, one of which is the output. grammar: context-free,
    in Lark or in GBNF (llama.cpp's EBNF). json_object: any JSON object. disable_any_whitespace, whitespace_pattern:
    JSON without whitespace, or with that of a regex, in place of any whitespace where JSON allows it.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        asked = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(asked) != 1:
            raise AdmissionError(f"structured_outputs needs exactly one of {', '.join(KINDS)}; got {asked or 'none'}")
        for kind in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(value := getattr(self, kind), str | None):
                raise AdmissionError(f"structured_outputs.{kind} is {value!r}; it must be a text")
        if self.choice is not None:
            choice = () if isinstance(self.choice, str) else tuple(self.choice)
            if not choice or not all(isinstance(text, str) and text for text in choice):
                raise AdmissionError(f"structured_outputs.choice is {self.choice!r}; it must be a list of texts")
            object.__setattr__(self, "choice", choice)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if (self.disable_any_whitespace or self.whitespace_pattern is not None) and self.kind not in (
            "json",
            "json_object",
        ):
            raise AdmissionError(f"structured_outputs.{self.kind} has no whitespace of JSON to say anything about")

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def _schema_text(schema: Any) -> str:
    """A schema as text, so that nothing of the caller's is kept."""
    try:
        value = json_text.loads(schema) if isinstance(schema, str) else schema
        return json_text.dumps(value)
    except (TypeError, ValueError) as error:
        raise AdmissionError(f"structured_outputs.json is no JSON schema: {error}") from error
