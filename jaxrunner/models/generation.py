"""`generation_config.json`: defaults of sampling, and the ids that end a generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrunner.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint; `CheckpointError` for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Download the whole checkpoint.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Download it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object. Download it again.")
    return value


def read_generation_config(directory: str | Path, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The generation configuration of a directory (empty where it has none), with `override` merged in key by key."""
    path = Path(directory) / "generation_config.json"
    return (read_json(path) if path.is_file() else {}) | dict(override or {})


def eos_token_ids(*sources: Any) -> tuple[int, ...]:
    """The union of end-of-sequence ids, ascending. Each source is an id, a list of ids, or None."""
    ids: set[int] = set()
    for source in sources:
        for value in source if isinstance(source, list | tuple) else (source,):
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
                raise CheckpointError(f"eos_token_id must be a token id or a list of ids, not {value!r}. Correct it.")
            ids.add(int(value))
    return tuple(sorted(ids))
