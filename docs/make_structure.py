"""Write docs/structure.md: one line for each module, the first sentence of its docstring.

python docs/make_structure.py
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "structure.md"
HEAD = """# Modules

One line for each module: the first sentence of its docstring. Written by `python docs/make_structure.py`.
"""


def structure() -> str:
    """The document. Raises ValueError for a module without a docstring."""
    files = sorted((ROOT / "jaxrunner").rglob("*.py"), key=lambda p: (p.parent.parts, p.name != "__init__.py", p.name))
    lines = [HEAD]
    for folder, modules in itertools.groupby(files, key=lambda p: p.parent):
        entries = [(path.name, first_sentence(path)) for path in modules]
        lines.append(f"## {folder.relative_to(ROOT).as_posix()}\n")
        if entries[0][0] == "__init__.py":
            lines.append(f"{entries.pop(0)[1]}\n")
        lines += [f"- `{name}`: {sentence}" for name, sentence in entries]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    if not paragraph and path.name != "__init__.py":
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring; its first sentence says what the module is for")
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph, maxsplit=1)[0]


if __name__ == "__main__":
    TARGET.write_text(structure(), encoding="utf-8")
