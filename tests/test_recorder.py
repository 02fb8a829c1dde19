"""The flight recorder: what it keeps replays bit for bit, and what does not is named."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from jaxrunner import DeviceRunner, SamplingParams
from jaxrunner.errors import CheckpointError
from jaxrunner.models.weights import random_weights
from jaxrunner.recorder import FlightRecorder, replay
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER, new, plan, run

RANDOM = SamplingParams(temperature=1.0)


@pytest.fixture(scope="module")
def table():
    """The executables of one runner, for all of this module: compiled once."""
    runner = DeviceRunner(*load_tiny("llama"), CONFIG, ladder=LADDER)
    return runner.table


@pytest.fixture
def runner(table):
    made = DeviceRunner(*load_tiny("llama"), CONFIG, ladder=LADDER)
    made.table = table
    return made


@pytest.fixture(autouse=True)
def shared_executables(monkeypatch, table):
    """A replay compiles its own; these share them, but for the test of just that."""
    monkeypatch.setattr("jaxrunner.recorder.BucketTable", lambda programs, **options: table)


def busy(runner, steps=9, serial=0):
    """Ragged and uniform steps, a request that ends and one that joins. Returns all tokens."""
    a, b, c = (f"{name}{serial}" for name in "abc")
    tokens = [run(runner, plan({a: 5, b: 9}, [new(a, [1, 2, 3, 4, 5], [1, 2, 3]), new(b, [9] * 9, [4, 5, 6], RANDOM)]))]
    for _ in range(steps):
        tokens.append(run(runner, plan({a: 1, b: 1})))
    tokens.append(run(runner, plan({c: 3, b: 1}, [new(c, [7, 8, 9], [7, 8])], finished_req_ids={a})))
    tokens.append(run(runner, plan({c: 1, b: 1})))
    runner.execute_model(plan({}, finished_req_ids={b, c}))
    return tokens


def test_a_recording_with_scored_prompts_replays(runner, tmp_path):
    """Chunks of a ragged step and of single tokens, before and after the second half of a step."""
    asking = SamplingParams(temperature=0.0, prompt_logprobs=1)
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 4, "b": 3}, [new("a", [1, 2, 3, 4, 5, 6], [1], asking), new("b", [7, 8, 9], [2])]))
        run(runner, plan({"a": 1, "b": 1}))
        run(runner, plan({"a": 1, "b": 1}))
        run(runner, plan({"a": 1, "b": 1}))
    ran = [line["program"]["kind"] for line in lines(tmp_path / "r", "call")]
    assert ran.count("prompt") == 2
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact
    assert (report.outputs, report.states) == (4, 1)


def lines(directory, kind):
    return [
        line
        for path in sorted(directory.glob("*/calls.jsonl"))
        for line in map(json.loads, path.read_text().splitlines())
        if kind in line
    ]


def test_a_recording_replays_bit_for_bit(runner, tmp_path):
    expected = busy(DeviceRunnerLike(runner))
    with FlightRecorder(runner, tmp_path / "r") as recorder:
        assert busy(runner) == expected, "recording must not change what is recorded"
    assert "call" not in vars(runner.table), "the runner is as it was"
    busy(runner, serial=1)
    recorder.close()
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact
    assert (report.calls, report.outputs, report.states) == (len(lines(tmp_path / "r", "call")), 12, 1)
    assert str(report) == f"{report.calls} calls replayed, 12 outputs and 1 states compared: all equal"
    recorded = [line["sampled_token_ids"] for line in lines(tmp_path / "r", "output")]
    assert recorded[1][:2] == list(expected[1].values())


def DeviceRunnerLike(runner):
    """A fresh runner over the same executables."""
    made = DeviceRunner(runner.model, runner.weights, CONFIG, ladder=LADDER)
    made.table = runner.table
    return made


def test_the_ring_is_bounded_and_begins_with_a_state(runner, tmp_path):
    """Old segments go; what is left replays from its own first state, over all kept segments."""
    with FlightRecorder(runner, tmp_path / "r", steps=6, segments=3):
        for serial in range(4):
            busy(runner, serial=serial)
    folders = sorted(p.name for p in (tmp_path / "r").iterdir())
    assert len(folders) == 3
    assert folders[0] > "segment-000000"
    assert all(len(lines_of) <= 7 for lines_of in map(calls_of, (tmp_path / "r").iterdir()))
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact
    assert report.states == 3, "both segment boundaries and the end"
    assert 12 < report.calls <= 21


def calls_of(folder):
    return [line for line in map(json.loads, (folder / "calls.jsonl").read_text().splitlines()) if "call" in line]


def test_a_process_that_dies_leaves_a_recording(runner, tmp_path):
    """Not closed, and its last line cut off: all complete calls replay."""
    recorder = FlightRecorder(runner, tmp_path / "r")
    busy(runner)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "r", copy)
    recorder.close()
    path = copy / "segment-000000" / "calls.jsonl"
    path.write_text(path.read_text() + '{"call": 99, "progr')
    report = replay(copy, *load_tiny("llama"))
    assert report.exact
    assert report.calls == len(lines(tmp_path / "r", "call"))
    assert report.states == 0


def test_a_difference_names_the_call(runner, tmp_path):
    with FlightRecorder(runner, tmp_path / "r"):
        busy(runner)
    path = tmp_path / "r" / "segment-000000" / "calls.jsonl"
    text = path.read_text()
    outputs = lines(tmp_path / "r", "output")
    number, tokens = outputs[4]["output"], json.dumps(outputs[4]["sampled_token_ids"])
    path.write_text(
        text.replace(
            f'"output": {number}, "sampled_token_ids": {tokens}',
            f'"output": {number}, "sampled_token_ids": [[0], [0], [0], [0]]',
        )
    )
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert not report.exact
    (difference,) = report.differences
    assert difference.startswith(f"call {number}: sampled [[")
    assert difference.endswith("recorded [[0], [0], [0], [0]]")
    assert f"first difference: call {number}" in str(report)

    path.write_text(text.replace(outputs[4]["sha256"], "0" * 64))
    (difference,) = replay(tmp_path / "r", *load_tiny("llama")).differences
    assert difference == f"call {number}: the same tokens, but other bits in its outputs"


def test_other_weights_are_found_out(runner, tmp_path):
    model, _ = load_tiny("llama")
    with FlightRecorder(runner, tmp_path / "r"):
        busy(runner)
    report = replay(tmp_path / "r", model, random_weights(model, 1))
    assert report.differences
    assert "state at the last call: other bits in" in report.differences[-1]


def test_replaced_weights_are_asked_for(runner, tmp_path):
    model, weights = load_tiny("llama")
    other = random_weights(model, 1)
    with FlightRecorder(runner, tmp_path / "r"):
        busy(runner)
        runner.weights = other
        busy(runner, serial=1)
    with pytest.raises(CheckpointError, match=r"weights were replaced after call \d+; pass them as `replacements`"):
        replay(tmp_path / "r", model, weights)
    assert replay(tmp_path / "r", model, weights, replacements=[other]).exact
    assert not replay(tmp_path / "r", model, weights, replacements=[weights]).exact


def test_a_state_put_in_from_outside_begins_a_segment(runner, tmp_path):
    with FlightRecorder(runner, tmp_path / "r", segments=3):
        busy(runner)
        runner.state = jax.tree.map(jnp.copy, runner.state)
        busy(runner, serial=1)
    headers = lines(tmp_path / "r", "segment")
    assert [h["continues"] for h in headers] == [False, False]
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact
    assert report.states == 1


def test_a_call_that_raised_is_reported_and_not_repeated(runner, tmp_path):
    good = runner.weights
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 3}, [new("a", [1, 2, 3], [1, 2])]))
        runner.weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), good)
        with pytest.raises(Exception, match="was compiled for other arguments"):
            runner.execute_model(plan({"a": 1}))
        runner.weights = good
        run(runner, plan({"a": 1}))
    report = replay(tmp_path / "r", *load_tiny("llama"), replacements=[None, good])
    assert report.exact
    (failed,) = report.failed
    assert "was compiled for other arguments" in failed


def test_a_replay_compiles_from_the_recording_alone(runner, tmp_path, monkeypatch):
    """No runner is at hand: the ladder and the bucket come from the file."""
    monkeypatch.undo()
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 3}, [new("a", [1, 2, 3], [1, 2])]))
        run(runner, plan({"a": 1}))
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact
    assert report.outputs == 2


def test_refusals(runner, tmp_path):
    model, weights = load_tiny("llama")
    with pytest.raises(CheckpointError, match="holds no recording"):
        replay(tmp_path, model, weights)
    with pytest.raises(ValueError, match="must be at least 1"):
        FlightRecorder(runner, tmp_path / "r", steps=0)
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 3}, [new("a", [1, 2, 3], [1, 2])]))
    with pytest.raises(CheckpointError, match="already holds a recording"):
        FlightRecorder(runner, tmp_path / "r")
    path = tmp_path / "r" / "segment-000000" / "calls.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"call": 2', '"call" 2'))
    with pytest.raises(CheckpointError, match=r"calls\.jsonl is damaged at line 3"):
        replay(tmp_path / "r", model, weights)
    path.write_text("")
    with pytest.raises(CheckpointError, match="is empty"):
        replay(tmp_path / "r", model, weights)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        replay(tmp_path / "r", model, weights)
    path.write_text(text)
    state = path.with_name("state.safetensors")
    state.write_bytes(state.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"state\.safetensors is not"):
        replay(tmp_path / "r", model, weights)
