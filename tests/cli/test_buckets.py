"""`jaxrunner buckets`: the table of any model and ladder, from a configuration alone or after a run."""

from __future__ import annotations

import json
import shutil

from typer.testing import CliRunner

from jaxrunner.cli import app
from tests.conftest import GOLDEN

TINY = GOLDEN / "tiny" / "llama"
SMALL = ("--max-num-seqs", 2, "--max-num-batched-tokens", 16, "--max-model-len", 64)
LADDER = ("--decode", "2", "--mixed", "16", "--finish", "2", "--tiers", "greedy")


def run(*args):
    return CliRunner().invoke(app, ["buckets", *map(str, args)])


def test_a_configuration_without_weights_is_enough_and_what_is_made_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRUNNER_COMPILATION_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    shutil.copy(TINY / "config.json", tmp_path / "model")
    arguments = ("--model", tmp_path / "model", *SMALL, *LADDER)
    first = run(*arguments, "--json")
    assert first.exit_code == 0, first.stderr
    report = json.loads(first.stdout)
    assert report["ladder"]["mixed"] == [16]
    names = [row["executable"] for row in report["executables"]]
    halves = ["begin mixed[t16/r2]", "finish[2]/greedy", "moves[64]", "prompt[16]"]
    assert names == ["admit[64]", *halves, "decode[2x1]/greedy"]
    assert all(row["trace_s"] > 0 < row["compile_s"] for row in report["executables"])
    again = run(*arguments)
    assert again.exit_code == 0, again.stderr
    assert "load s" in again.stdout
    assert "6 executables, 0 misses" in again.stdout
    again = json.loads(run(*arguments, "--json").stdout)
    assert all(row["load_s"] > 0 == row["compile_s"] for row in again["executables"])

    used = run("--model", TINY, *SMALL, *LADDER, "--run", 4, "--json")
    assert used.exit_code == 0, used.stderr
    report = json.loads(used.stdout)
    hits = {row["executable"]: row["hits"] for row in report["executables"]}
    assert hits["begin mixed[t16/r2]"] > 0 < hits["decode[2x1]/greedy"]
    assert any(0 < row["waste"] < 1 for row in report["executables"])
    assert report["misses"] == 0


def test_a_ladder_that_does_not_fit_the_sizes_is_refused():
    result = run("--model", TINY, *SMALL, "--decode", "4", "--finish", "4")
    assert result.exit_code == 1
    assert "ends at 4 requests and 16 tokens" in result.stderr
    assert run("--model", TINY, *SMALL, "--decode", "2,1").exit_code == 1
    assert "the tiers are greedy, random" in run("--model", TINY, *SMALL, "--tiers", "greedy,fast").stderr
    assert run("--model", TINY, "--decode", "many").exit_code == 2
