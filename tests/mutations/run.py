"""Applies mutations to a copy of the package and demands that the tests named for them fail.

python -m tests.mutations.run              all of them
python -m tests.mutations.run commit admit those whose name contains one of the words
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tests.mutations.mutation import Mutation
from tests.mutations.mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 600
PASSED = re.compile(r"^PASSED (\S.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """survived: named tests that passed although the package was wrong. error: why nothing was run."""

    mutation: Mutation
    survived: tuple[str, ...]
    seconds: float
    error: str = ""

    @property
    def killed(self) -> bool:
        return not self.survived and not self.error

    def __str__(self) -> str:
        verdict = "killed" if self.killed else "SURVIVED" if self.survived else "ERROR"
        lines = [f"{verdict:<9}{self.seconds:6.1f} s  {self.mutation.name}"]
        return "\n".join([*lines, *(f"           passed: {t}" for t in self.survived), *self.error.splitlines()[-5:]])


def mutated(mutation: Mutation, root: Path = ROOT) -> str:
    """The text of the mutated file. Raises ValueError unless the text to replace occurs exactly once."""
    text = (root / "jaxrunner" / mutation.file).read_text()
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.name}: the text to replace occurs {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def make_copy(target: Path) -> None:
    """The package and its tests in a directory of their own; the golden data are linked."""
    ignore = shutil.ignore_patterns("__pycache__", "golden")
    for name in ("jaxrunner", "tests"):
        shutil.copytree(ROOT / name, target / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", target)
    (target / "tests" / "golden").symlink_to(ROOT / "tests" / "golden", target_is_directory=True)


def run_one(mutation: Mutation, copy: Path) -> Outcome:
    """Apply one mutation to `copy`, run its tests there, and undo it."""
    started = time.perf_counter()
    try:
        text = mutated(mutation, copy)
    except ValueError as error:
        return Outcome(mutation, (), 0.0, str(error))
    path = copy / "jaxrunner" / mutation.file
    original = path.read_text()
    path.write_text(text)
    try:
        done = run_tests(mutation.tests, copy)
    except subprocess.TimeoutExpired:
        return Outcome(mutation, (), LIMIT_SECONDS, f"the tests did not end within {LIMIT_SECONDS} s")
    finally:
        path.write_text(original)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1):  # pytest: 0 all passed, 1 some failed, others mean that it could not run
        return Outcome(mutation, (), seconds, done.stdout + done.stderr)
    return Outcome(mutation, tuple(t for t in PASSED.findall(done.stdout) if t in mutation.tests), seconds)


def run_tests(tests: Iterable[str], copy: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rp", "--tb=short", *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)


def run(mutations: Iterable[Mutation]) -> list[Outcome]:
    """All of them, one after the other, printed as they come. The unchanged copy must pass every test first."""
    mutations = list(mutations)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        make_copy(copy)
        named = sorted({test for m in mutations for test in m.tests})
        clean = run_tests(named, copy)
        if clean.returncode != 0:
            raise SystemExit(f"the tests fail without any mutation:\n{clean.stdout[-3000:]}{clean.stderr[-1000:]}")
        if missing := set(named) - set(PASSED.findall(clean.stdout)):  # else they would count as killers of everything
            raise SystemExit(f"no test has the name {sorted(missing)}")
        outcomes = []
        for mutation in mutations:
            outcomes.append(run_one(mutation, copy))
            print(outcomes[-1], flush=True)
    return outcomes


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    outcomes = run(chosen)
    alive = [o for o in outcomes if not o.killed]
    print(f"{len(outcomes) - len(alive)} of {len(outcomes)} mutations were killed by every test named for them")
    return 1 if alive or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
