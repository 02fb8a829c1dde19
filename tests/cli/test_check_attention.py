"""`jaxrunner check-attention`: a right attention passes, and each wrong one fails in the specs that show its fault."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxrunner.checks import attention_specs
from jaxrunner.cli import app

USER = "tests.pallas.user_attentions:"


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["check-attention", *arguments])


def rows(function: str, *options: str):
    """(exit code, spec -> row)."""
    result = invoke(USER + function, "--json", *options)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, {row["spec"]: row for row in lines}


def failed(found) -> dict[str, str]:
    return {name: row["reason"] for name, row in found.items() if not row["pass"]}


@pytest.mark.parametrize("name", ["attention:attention_xla", "attention_reference:attention_reference"])
def test_the_built_in_ones_pass(name):
    result = invoke(f"jaxrunner.pallas.{name}", "--only", "ragged tiny")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].split()[:4] == ["pass", "ragged", "tiny", "bfloat16"]
    assert "2 of 2 specs passed" in result.stderr


def test_a_right_one_passes_every_spec():
    code, found = rows("right", "--random", "1", "--dtype", "float32")
    assert code == 0, failed(found)
    assert set(found) == {spec.name for spec in attention_specs.SMALL} | {"random 0"}
    assert all(row["dtype"] == "float32" and row["error"] < 1e-5 for row in found.values())


def test_a_causal_mask_that_is_off_by_one_fails():
    code, found = rows("off_by_one", "--only", "ragged")
    assert code == 1
    assert set(failed(found)) == set(found)
    assert "off by more than" in found["ragged one chunk"]["reason"]


def test_a_window_that_is_ignored_fails_where_there_is_one():
    code, found = rows("ignores_window", "--only", "tiny")
    assert code == 1
    assert set(failed(found)) == {"ragged tiny window"}


def test_a_nan_that_leaks_from_a_dead_block_fails():
    code, found = rows("leaks_nan", "--only", "decode head")
    assert code == 1
    assert set(failed(found)) == set(found)
    assert "NaN or infinity" in found["decode head 96"]["reason"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("wrong_type", "type float32, not that of q, bfloat16"),
        ("wrong_shape", "shape (10, 64), not that of q, (10, 3, 64)"),
        ("raises", "it raised RuntimeError: only head size 128"),
    ],
)
def test_a_wrong_result_is_named(function, reason):
    code, found = rows(function, "--only", "ragged cap")
    assert code == 1
    assert reason in found["ragged cap and sinks"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:f"], "no module 'no_such_module'"),
        (["tests.pallas.no_such:f"], "no module 'tests.pallas.no_such'"),
        ([USER + "nothing"], "has no function 'nothing'"),
        (["tests.pallas.user_attentions"], "module:function"),
        ([USER + "NOT_A_FUNCTION"], "is no function but a int"),
        ([USER + "without_sinks"], "unexpected keyword argument 'sinks'"),
        ([USER + "right", "--float8"], "unexpected keyword argument 'kv_scales'"),
        ([USER + "right", "--only", "nonsense"], "no spec has 'nonsense' in its name"),
        ([USER + "right", "--dtype", "int8"], "no spec can have the type 'int8'"),
    ],
)
def test_what_cannot_be_judged_is_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
