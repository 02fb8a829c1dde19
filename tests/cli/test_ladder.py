"""`jaxrunner ladder`: what it prints, what it writes, and what it refuses in one line."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxrunner import Ladder
from jaxrunner.cli import app
from jaxrunner.ladder.rules import vllm_sizes
from jaxrunner.ladder.trace_csv import write_trace
from jaxrunner.ladder.traces import Trace

SMALL = ("--max-num-seqs", "32", "--max-num-batched-tokens", "1024")
POISSON = ("--trace", "poisson", "--requests", "80", *SMALL)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["ladder", *arguments])


def test_sizes_by_vllms_rule():
    result = invoke("sizes", "--rule", "vllm", "--max-num-seqs", "512")
    assert result.exit_code == 0
    assert result.stdout == f"capture sizes, 51: {' '.join(map(str, vllm_sizes(512)))}\n"


def test_sizes_with_drafts():
    found = json.loads(invoke("sizes", "--max-num-seqs", "4", "--spec-tokens", "3", "--json").stdout)
    assert found == {"capture sizes": [1, 2, 4, 8, 16, 24, 32]}
    v1 = json.loads(
        invoke("sizes", "--rule", "vllm-v1", "--max-num-seqs", "512", "--spec-tokens", "2", "--json").stdout
    )
    assert len(v1["capture sizes"]) == 49
    assert v1["capture sizes"][-1] == 498


def test_sizes_of_both_axes():
    found = json.loads(invoke("sizes", "--rule", "powers-of-two", *SMALL, "--json").stdout)
    assert found == {"decode": [1, 2, 4, 8, 16, 32], "mixed": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]}


def test_compare_prints_every_ladder_and_every_pair(tmp_path):
    Ladder((4, 32), (64, 1024), (32,)).save(tmp_path / "mine.json")
    options = ("--ladder", str(tmp_path / "mine.json"), "--capture-sizes", "8,1,32,8")
    found = json.loads(invoke("compare", *POISSON, *options, "--json").stdout)
    names = [row["ladder"] for row in found["ladders"]]
    assert names[:2] == ["jaxrunner", "vllm"]
    assert {"mine", "vLLM 0.33 graphs", "fitted, 16"} <= set(names)
    rows = dict(zip(names, found["ladders"], strict=True))
    assert rows["mine"]["buckets"] == 4
    assert rows["vLLM 0.33 graphs"]["buckets"] == 3
    assert rows["vLLM 0.33 graphs"]["eager_steps"] > 0
    eager = json.loads(invoke("compare", *POISSON, "--mode", "NONE", "--release", "0.28", "--json").stdout)["ladders"]
    (row,) = [row for row in eager if row["ladder"] == "vLLM 0.28 graphs"]
    assert row["eager_steps"] == row["steps"]
    assert row["executables"] == row["buckets"] == row["waste"] == 0
    text = invoke("compare", *POISSON).stdout
    assert "steps to fit on" in text
    assert all(pair["rule"] in text for pair in found["pairs"] if pair["rule"] != "mine")


def test_optimal_writes_a_ladder_that_an_engine_takes(tmp_path):
    path = tmp_path / "ladder.json"
    result = invoke("optimal", "--buckets", "6", *POISSON, "--output", str(path))
    assert result.exit_code == 0, result.output
    ladder = Ladder.load(path)
    ladder.check_holds(max_num_seqs=32, max_num_batched_tokens=1024)
    assert len(ladder.decode) + len(ladder.mixed) == 6
    assert f"decode, {len(ladder.decode)}: {' '.join(map(str, ladder.decode))}\n" in result.stdout


def test_a_trace_from_a_file_and_the_costs_of_tokens(tmp_path):
    path = tmp_path / "requests.csv"
    write_trace(Trace.bursty(10, 60, seed=1), path)
    result = invoke("compare", "--trace", str(path), *SMALL, "--costs", "tokens")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("requests: ")


def test_report_writes_one_page(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "page.html"
    result = invoke("report", "--output", str(path), *POISSON)
    assert result.exit_code == 0, result.output
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "Poisson, 15/s" in text
    assert str(path) in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sizes", "--rule", "best"], "unknown rule 'best'"),
        (["sizes", "--rule", "linear", "--spec-tokens", "1"], "--spec-tokens and --blackwell are for vLLM's rules"),
        (["compare", "--trace", "nowhere.csv"], "nowhere.csv is no file"),
        (["compare", "--mode", "FAST", *POISSON], "unknown mode 'FAST'; use one of NONE, PIECEWISE"),
        (["compare", "--release", "0.1", *POISSON], "unknown release '0.1'"),
        (["compare", "--costs", "nothing", *POISSON], "shipped measurements are"),
        (["compare", "--capture-sizes", "1;2", *POISSON], "are no numbers"),
        (["compare", "--ladder", "nowhere.json", *POISSON], "nowhere.json holds no ladder"),
        (["optimal", "--buckets", "4", "--trace", "poisson", "--rate", "0"], "rate 0"),
        (
            ["optimal", "--buckets", "4", "--max-num-seqs", "64", "--max-num-batched-tokens", "8"],
            "at least max_num_seqs",
        ),
    ],
)
def test_what_is_refused_is_one_line(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert "Traceback" not in result.output
