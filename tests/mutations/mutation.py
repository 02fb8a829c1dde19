"""`Mutation`: one deliberate mistake."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutation:
    """fast: quick enough to be run within the test suite."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    fast: bool = False
