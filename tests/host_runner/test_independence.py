"""Two designs, one contract: what they may share, what they may not, and who must not know which of them runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "jaxrunner"
DEVICE_PATH = (
    "jaxrunner.pallas.input_prep",
    "jaxrunner.pallas.slot_mapping",
    "jaxrunner.pallas.commit",
    "jaxrunner.stages.apply_diffs",
    "jaxrunner.stages.batch",
    "jaxrunner.stages.commit",
    "jaxrunner.stages.inputs",
    "jaxrunner.stages.prepare_inputs",
    "jaxrunner.stages.step",
    "jaxrunner.state.admission",
    "jaxrunner.state.block_writes",
    "jaxrunner.state.requests",
    "jaxrunner.runner.batch_order",
    "jaxrunner.runner.host_rows",
    "jaxrunner.runner.rows",
)
"""Request state and input preparation of `DeviceRunner`."""


def imported(path: Path) -> set[str]:
    """Modules and the names taken from them, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def classes(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


HOST_FILES = sorted((ROOT / "host_runner").glob("*.py"))


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda p: p.stem)
def test_no_input_preparation_is_shared(path):
    assert not imported(path) & set(DEVICE_PATH)


def test_no_type_name_is_shared():
    host = {name for path in HOST_FILES for name in classes(path)}
    others = {name for path in ROOT.rglob("*.py") if path not in HOST_FILES for name in classes(path)}
    assert "HostRunner" in host
    assert not host & others


SCHEDULING = [
    ROOT / "engine" / f"{name}.py" for name in ("scheduler", "columns", "request", "block_pool", "prefix_hash")
]
ATTENTION = [*(ROOT / "pallas").glob("*.py"), *(ROOT / "models").glob("*.py"), ROOT / "stages" / "forward.py"]


@pytest.mark.parametrize("path", SCHEDULING + ATTENTION, ids=lambda p: p.stem)
def test_neither_scheduler_nor_model_nor_kernel_asks_which_runner_runs(path):
    """They import neither runner, and no name of theirs says `HostRunner` or `DeviceRunner`."""
    runners = {"jaxrunner.runner.device_runner", "jaxrunner.DeviceRunner", "jaxrunner.HostRunner"}
    found = imported(path)
    assert not found & runners
    assert not any(name.startswith("jaxrunner.host_runner") for name in found)
    tree = ast.parse(path.read_text())
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert not words & {"HostRunner", "DeviceRunner", "runner", "runner_class"}
