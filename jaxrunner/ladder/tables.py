"""Rows as a table of text, and single values as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Column = tuple[str, str, str]
"""(key of a row, heading, format)."""


def shown(value: Any, form: str) -> str:
    """A value by its format: Python's, or "GiB" for bytes; "-" for None, which is what was not measured."""
    if value is None:
        return "-"
    return f"{value / 2**30:.2f}" if form == "GiB" else format(value, form)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    """Headings and one line a row; the first column to the left, all others to the right."""
    cells = [[heading for _, heading, _ in columns]]
    cells += [[shown(row[key], form) for key, _, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first, *rest = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *rest]).rstrip())
    return "\n".join(lines)
