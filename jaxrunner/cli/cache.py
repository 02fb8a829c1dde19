"""`jaxrunner cache list`, `check` and `clear`: the executables that earlier starts have left on disk."""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jaxrunner.cli.console import command

if TYPE_CHECKING:
    from jaxrunner.compile.executable_cache import ExecutableCache

cache = typer.Typer(name="cache", help="Show, verify or remove the executables kept on disk.", no_args_is_help=True)
Directory = Annotated[
    Path | None, typer.Option(help="Left out: $JAXRUNNER_COMPILATION_CACHE, or executables in the package's cache.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object an entry.")]


@cache.command("list")
def list_(directory: Directory = None, as_json: AsJson = False) -> None:
    """Show every entry: what it is, its size, when it was last used, and whether this installation would use it."""
    with command() as console:
        opened = _open(directory)
        rows = _rows(opened)
        _show(rows, as_json)
        total = sum(row["bytes"] for row in rows) / 1e6
        console.print(f"{len(rows)} entries, {total:.1f} MB, in {opened.directory}", style="dim", markup=False)


@cache.command()
def check(directory: Directory = None, as_json: AsJson = False) -> None:
    """Verify every signature; show the entries that are damaged or foreign and exit with 1 if there is any."""
    with command() as console:
        rows = _rows(_open(directory))
        bad = [row for row in rows if row["state"] == "bad"]
        _show(bad, as_json)
        console.print(f"{len(rows) - len(bad)} of {len(rows)} entries are sound", style="dim")
        if bad:
            raise typer.Exit(1)


@cache.command()
def clear(
    directory: Directory = None,
    unusable: Annotated[
        bool, typer.Option("--unusable", help="Only what is damaged, foreign or made by other versions.")
    ] = False,
) -> None:
    """Remove all entries."""
    with command() as console:
        opened = _open(directory)
        chosen = [row for row in _rows(opened) if not unusable or row["state"] != "usable"]
        for row in chosen:
            with contextlib.suppress(FileNotFoundError):
                (opened.directory / row["file"]).unlink()
        total = sum(row["bytes"] for row in chosen) / 1e6
        console.print(f"removed {len(chosen)} entries, {total:.1f} MB, from {opened.directory}", markup=False)


def _open(directory: Path | None) -> ExecutableCache:
    from jaxrunner.compile.executable_cache import open_cache
    from jaxrunner.errors import CacheError

    opened = open_cache(directory)
    if opened is None:
        raise CacheError("there is no cache to look at: it is off or cannot be used; name one with --directory")
    return opened


def _rows(opened: ExecutableCache) -> list[dict[str, Any]]:
    from jaxrunner.compile.cache_key import environment

    here, rows = environment(), []
    for file in opened.files():
        other = [] if file.problem else file.differs(here)
        note = file.problem or (f"made for another {', '.join(other)}" if other else "")
        rows.append(
            {
                "executable": file.program,
                "bytes": file.num_bytes,
                "used": datetime.datetime.fromtimestamp(file.used).isoformat(" ", "minutes"),
                "state": "bad" if file.problem else "stale" if other else "usable",
                "note": note,
                "file": file.path.name,
            }
        )
    return rows


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    table = Console(soft_wrap=True, highlight=False)
    for row in rows:
        if as_json:
            print(json.dumps(row))
        else:
            line = f"{row['executable'] or row['file'][:24]:<28}{row['bytes'] / 1e6:>8.2f} MB  {row['used']}  "
            style = {"bad": "red", "stale": "dim"}.get(row["state"])
            table.print(f"{line}{row['state']:<7}{row['note']}".rstrip(), style=style, markup=False)
