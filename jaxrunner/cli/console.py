"""What all commands share: results go to stdout, everything else to stderr, and an error is one line."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import typer
from rich.console import Console

from jaxrunner.errors import JaxrunnerError


class _ConsoleHandler(logging.Handler):
    """A record is one dim line; through the console, so that it does not break a status line."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), style="dim", markup=False, highlight=False)


@contextlib.contextmanager
def command() -> Iterator[Console]:
    """A command's surroundings: its console on stderr, which also shows the package's log.

    A `JaxrunnerError` inside becomes one red line and exit code 1. An interruption ends with exit code 130.
    """
    console = Console(stderr=True, soft_wrap=True)
    logger = logging.getLogger("jaxrunner")
    handler = _ConsoleHandler(console)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield console
    except JaxrunnerError as error:
        text = " ".join(line.strip() for line in str(error).splitlines())
        console.print(f"error: {text}", style="bold red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def announce_download(console: Console, model: str | None) -> None:
    """Say that the default model is about to be downloaded, if it is."""
    from jaxrunner.models.default_model import NAME, NUM_BYTES, cache_directory

    if model is None and not (cache_directory() / NAME).is_file():
        console.print(f"downloading the default model, SmolLM2-135M-Instruct ({NUM_BYTES / 1e6:.0f} MB), once")
