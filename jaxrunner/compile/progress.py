"""A progress bar over the programs of a warm-up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Report = Callable[[int, int, str], None]
"""Called as report(done, total, name)."""


@contextlib.contextmanager
def reporting(progress: bool | Report, total: int) -> Iterator[Report]:
    """What a warm-up calls after each program: a bar on stderr for True, nothing for False, or the caller's own."""
    if not isinstance(progress, bool):
        yield progress
    elif not progress or not total:
        yield lambda done, total, name: None
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("compiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, total, name: bar.update(task, completed=done, description=name)
