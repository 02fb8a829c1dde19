"""What reads a field of a configuration, found in the source: an option that nothing reads is refused by `explain`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_FILE = "runner/config.py"
OPTION_HOMES = (("engine/llm.py", "LLM.__init__"), ("engine/sizes.py", "runner_config"))
"""Functions that take the options of an engine. What they hand on is a field of `RunnerConfig`, or read here."""
Readers = dict[str, tuple[str, ...]]
_VARIABLE = re.compile(r"JAXRUNNER_[A-Z_]+")


@dataclasses.dataclass(frozen=True)
class _Function:
    """A function or method, what is defined in it included."""

    file: str
    name: str
    node: ast.AST

    @property
    def place(self) -> str:
        return f"{self.file}: {self.name}"


def config_readers(package: Path = PACKAGE) -> Readers:
    """Field of `RunnerConfig` -> the places that read it as `config.<field>`, its own validation aside.

    A property of the class stands for the fields it is computed from.
    """
    functions = _functions(package)
    own = [f for f in functions if f.file == CONFIG_FILE and f.name.startswith("RunnerConfig.")]
    return _readers(functions, own, "RunnerConfig", package / CONFIG_FILE, receiver="config")


def facts_readers(files: Iterable[str], package: Path = PACKAGE) -> Readers:
    """Field of `Facts` -> the functions of `files` (relative to the package) that read it as `facts.<field>`."""
    facts = "selection/facts.py"
    functions = [f for name in (*files, facts) for f in _functions_of(package, package / name)]
    own = [f for f in functions if f.name.startswith("Facts.")]
    return _readers(functions, own, "Facts", package / facts, receiver="facts")


def option_readers(package: Path = PACKAGE) -> Readers:
    """Option of `LLM` -> what reads it; of one that becomes a field of `RunnerConfig`, the readers of the field."""
    fields = config_readers(package)
    found: dict[str, set[str]] = {name: set(places) for name, places in fields.items()}
    for file, name in OPTION_HOMES:
        (function,) = (f for f in _functions_of(package, package / file) if f.name == name)
        loads = {n.id for n in ast.walk(function.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        for argument in _arguments(function.node):
            found.setdefault(argument, set())
            if argument in loads and argument not in fields:
                found[argument].add(function.place)
    return _sorted(found)


def environment_readers(package: Path = PACKAGE) -> Readers:
    """Environment variable JAXRUNNER_* -> the files that name it as a constant."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(_tree(path)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if _VARIABLE.fullmatch(text):
                found[text].add(path.relative_to(package).as_posix())
    return _sorted(found)


def _readers(functions: list[_Function], own: list[_Function], cls: str, file: Path, *, receiver: str) -> Readers:
    fields = _fields(file, cls)
    computed = {f.name.partition(".")[2]: _attributes(f, "self") for f in own}
    stands_for = {name: {name} for name in fields}
    for name in computed.keys() - fields:
        stands_for[name] = _expand(name, computed, fields)
    found: dict[str, set[str]] = {name: set() for name in fields}
    for function in functions:
        if function in own:
            continue
        for attribute in _attributes(function, receiver) & stands_for.keys():
            for name in stands_for[attribute]:
                found[name].add(function.place)
    return _sorted(found)


def _expand(name: str, computed: dict[str, set[str]], fields: set[str]) -> set[str]:
    read = computed.get(name, set())
    deeper = (read & computed.keys()) - fields - {name}
    return (read & fields).union(*(_expand(inner, computed, fields) for inner in deeper))


def _attributes(function: _Function, receiver: str) -> set[str]:
    """Names read as `receiver.<name>` or `<anything>.receiver.<name>`."""
    found = set()
    for node in ast.walk(function.node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            base = node.value
            named = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else None
            if named == receiver:
                found.add(node.attr)
    return found


def _fields(file: Path, cls: str) -> set[str]:
    (node,) = (n for n in _tree(file).body if isinstance(n, ast.ClassDef) and n.name == cls)
    return {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def _functions(package: Path) -> list[_Function]:
    """All of the package but the command line: what a command reads for itself has no effect on an engine."""
    files = [path for path in sorted(package.rglob("*.py")) if package / "cli" not in path.parents]
    return [f for path in files for f in _functions_of(package, path)]


def _functions_of(package: Path, path: Path) -> list[_Function]:
    file, found = path.relative_to(package).as_posix(), []
    for node in _tree(path).body:
        if isinstance(node, ast.FunctionDef):
            found.append(_Function(file, node.name, node))
        elif isinstance(node, ast.ClassDef):
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            found += [_Function(file, f"{node.name}.{n.name}", n) for n in methods]
    return found


def _arguments(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.FunctionDef)
    return [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _sorted(found: dict[str, set[str]]) -> Readers:
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}
