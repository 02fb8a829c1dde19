"""The README's Python examples run, and what it says about the tree and the commands is so."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxrunner.cli import app
from jaxrunner.sampling_params import NOT_BUILT_DEFAULTS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.smollm2
@pytest.mark.parametrize("code", BLOCKS, ids=[f"block{i}" for i in range(len(BLOCKS))])
def test_the_examples_run(code, capsys):
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "Paris" in capsys.readouterr().out


def test_the_two_commands_are_there():
    commands = re.findall(r"```sh\n(.*?)\n```", TEXT, re.DOTALL)
    assert len(commands) == 2
    assert all(c.startswith("python3 -m venv .venv && .venv/bin/pip install -q ") and "\n" not in c for c in commands)
    assert commands[1] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_tree_is_as_described():
    tree = TEXT.split("## The tree")[1].split("```")[1]
    for line in tree.strip().splitlines()[1:]:
        name = line.split()[0]
        parent = ROOT / "jaxrunner" if line.startswith("  ") else ROOT
        assert (parent / name).exists(), name


def test_it_names_every_sampling_parameter_that_is_not_built_and_no_other():
    paragraph = re.search(r"^Not built: (.*?)\n\n", TEXT, re.DOTALL | re.MULTILINE).group(1)
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(NOT_BUILT_DEFAULTS)


def test_the_commands_it_names_exist():
    listed = CliRunner().invoke(app, ["--help"]).stdout
    named = set(re.findall(r"[`/]jaxrunner ([a-z]+)[ `]", TEXT))
    assert {"generate", "score", "doctor"} <= named
    assert all(name in listed for name in named)


def test_the_structure_document_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_structure", ROOT / "docs" / "make_structure.py")
    make_structure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_structure)
    written = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert written == make_structure.structure(), "run: python docs/make_structure.py"
