"""Chat templates: Jinja text from a checkpoint, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jaxrunner.errors import AdmissionError, CheckpointError

if TYPE_CHECKING:
    from jinja2 import Template


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The prompt text for `messages` (`{"role": ..., "content": ...}`), with `variables` visible to the template.

    The text comes from a download, so it runs in Jinja's immutable sandbox. Raises `AdmissionError` with the template's
    own message where it refuses the messages, `CheckpointError` where the template itself is broken.
    """
    from jinja2 import TemplateError

    compiled = _compile(template)
    try:
        return compiled.render(messages=messages, **variables)
    except (TemplateError, TypeError) as error:
        raise AdmissionError(f"the chat template refuses these messages: {error}") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's part for training; here it is only its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    try:
        return environment.from_string(template)
    except TemplateSyntaxError as error:
        raise CheckpointError(f"the checkpoint's chat template is no valid Jinja: {error}.") from error
