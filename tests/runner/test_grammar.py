"""Grammar masks behind a runner: each finds its row, none is missed, and no neighbour notices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrunner import SamplingParams, StructuredOutputsParams
from jaxrunner.contract import GrammarOutput
from jaxrunner.errors import AdmissionError
from jaxrunner.recorder import FlightRecorder, replay
from tests.conftest import load_tiny
from tests.runner.plans import GREEDY, both_runners, new, num_computed, plan, run

PROMPT, BLOCKS = [5, 9, 17, 9], {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9], "d": [10, 11, 12]}
STRUCTURED = dataclasses.replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[a-z]*"))
DRAWN = SamplingParams(seed=5, top_k=40, structured_outputs=STRUCTURED.structured_outputs)


def admit(req_id, params, prompt=PROMPT):
    return new(req_id, prompt, BLOCKS[req_id], params)


def masks(allowed: dict[str, list[int]], num_words: int = 8) -> GrammarOutput:
    """request id -> the ids that it may take."""
    bits = np.zeros((len(allowed), num_words * 32), bool)
    for row, ids in enumerate(allowed.values()):
        bits[row, ids] = True
    return GrammarOutput(list(allowed), np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def step(runner, scheduler_output, allowed=None, **options):
    """One step under masks; request id -> sampled ids."""
    assert runner.execute_model(scheduler_output) is None
    output = runner.sample_tokens(None if allowed is None else masks(allowed, **options))
    assert output.sampling_errors == {}
    return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))


def used(runner) -> dict[str, int]:
    return {row["executable"]: row["hits"] for row in runner.table.stats()}


@both_runners
def test_k070_a_mask_finds_its_row_by_its_request(runner):
    """Masks in another order than the batch, one for a prompt that is not complete, none for a plain request between
    them."""
    one_id = {"c": [200], "a": [7], "b": [255], "d": [0]}
    first = [admit("a", STRUCTURED, PROMPT[:2]), admit("b", GREEDY, PROMPT[:2]), admit("c", STRUCTURED)]
    first.append(admit("d", STRUCTURED, PROMPT[:1]))
    allowed = {req_id: one_id[req_id] for req_id in ("c", "a", "d")}
    tokens = step(runner, plan({"a": 2, "b": 2, "c": 3, "d": 1}, first), allowed)
    assert [r for r in tokens if r in allowed] != list(allowed)
    assert (tokens["a"], tokens["c"], tokens["d"]) == ([7], [], [0])
    tokens = step(runner, plan({"c": 1, "b": 1, "d": 1, "a": 1}), {"d": [1], "c": [200], "a": [31]})
    assert (tokens["a"], tokens["c"], tokens["d"]) == ([31], [200], [1])


@both_runners
def test_k071_a_wider_mask_is_cut_and_a_narrower_one_forbids_the_rest(runner):
    """256 ids are 8 words. Bits of a ninth word name no id; ids past a seventh are forbidden."""
    tokens = step(runner, plan({"a": 4}, [admit("a", STRUCTURED)]), {"a": [9, *range(256, 288)]}, num_words=9)
    assert tokens == {"a": [9]}
    every = list(range(7 * 32))
    bias = dataclasses.replace(STRUCTURED, logit_bias={230: 1000.0, 220: 500.0})
    assert step(runner, plan({"b": 4}, [admit("b", bias)]), {"b": every}, num_words=7) == {"b": [220]}


@both_runners
def test_k072_a_plain_request_beside_a_structured_one_is_free(runner):
    """The plain one's tokens are those that it has alone, in fused steps; padding stays as it is."""
    alone = run(runner, plan({"a": 4}, [admit("a", GREEDY)]))["a"]
    for _ in range(3):
        alone += run(runner, plan({"a": 1}))["a"]
    both = [admit("b", GREEDY), admit("c", STRUCTURED)]
    tokens = step(runner, plan({"b": 4, "c": 4}, both, finished_req_ids={"a"}), {"c": [3]})
    for _ in range(3):
        for req_id, ids in step(runner, plan({"b": 1, "c": 1}), {"c": [3]}).items():
            tokens[req_id] += ids
    assert tokens == {"b": alone, "c": [3] * 4}
    assert len(set(alone)) == 4
    runner.audit()


@both_runners
@pytest.mark.parametrize("params", [STRUCTURED, DRAWN, dataclasses.replace(STRUCTURED, presence_penalty=0.5)])
def test_a_request_whose_mask_leaves_no_id_fails_alone(runner, params):
    """In tiers with and without constraints; its row is as it was before the step, its neighbour's token the same."""
    expected = run(runner, plan({"b": 4}, [admit("b", GREEDY)]))["b"]
    fresh = [admit("a", params), admit("c", GREEDY)]
    assert runner.execute_model(plan({"a": 4, "c": 4}, fresh, finished_req_ids={"b"})) is None
    output = runner.sample_tokens(masks({"a": []}))
    assert list(output.sampling_errors) == ["a"]
    assert "grammar" in output.sampling_errors["a"]
    assert output.sampled_token_ids == [[], expected]
    assert num_computed(runner, "a") == 0


@both_runners
def test_draws_stay_within_the_mask(runner):
    """Twenty draws from six ids give several of them, and the same ones beside a neighbour and after a preemption."""
    allowed = [0, 31, 32, 100, 254, 255]
    alone = step(runner, plan({"a": 4}, [admit("a", DRAWN)]), {"a": allowed})["a"]
    for _ in range(19):
        alone += step(runner, plan({"a": 1}), {"a": allowed})["a"]
    assert set(alone) <= set(allowed)
    assert len(set(alone)) > 2
    both = [admit("b", GREEDY), admit("d", DRAWN)]
    again = step(runner, plan({"b": 4, "d": 4}, both, finished_req_ids={"a"}), {"d": allowed})["d"]
    again += step(runner, plan({"b": 1, "d": 1}), {"d": allowed})["d"]
    assert runner.execute_model(plan({}, preempted_req_ids={"d"})) is not None
    back = new("d", PROMPT, [20, 21, 22], DRAWN, prefill_token_ids=PROMPT + again)
    assert step(runner, plan({"b": 1, "d": 4}, [back]))["d"] == []
    for count in [2, *[1] * 17]:
        again += step(runner, plan({"d": count}), {"d": allowed})["d"]
    assert again == alone


@both_runners
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "'a' has structured_outputs; give sample_tokens"),
        (masks({}), "'a' has structured_outputs; give sample_tokens"),
        (masks({"a": [1], "b": [1]}), "'b' has a grammar mask"),
        (masks({"a": [1], "z": [1]}), "'z' has a grammar mask"),
        (GrammarOutput(["a", "a"], np.zeros((2, 8), np.int32)), "twice"),
        (GrammarOutput(["a"], np.zeros((2, 8), np.int32)), r"int32\[2, 8\] for 1 requests"),
        (GrammarOutput(["a"], np.zeros((1, 8), np.int64)), r"int64\[1, 8\]"),
        (GrammarOutput(["a"], np.zeros(8, np.int32)), r"int32\[8\]"),
    ],
)
def test_masks_that_do_not_fit_are_refused_and_the_step_waits(runner, given, message):
    fresh = [admit("a", STRUCTURED), admit("b", GREEDY)]
    assert runner.execute_model(plan({"a": 4, "b": 4}, fresh)) is None
    with pytest.raises(AdmissionError, match=message):
        runner.sample_tokens(given)
    assert runner.sample_tokens(masks({"a": [77]})).sampled_token_ids[0] == [77]


@both_runners
def test_only_steps_with_a_structured_request_are_split(runner):
    """And they need no executable that other batches do not have."""
    before = used(runner)
    step(runner, plan({"a": 4, "b": 4}, [admit("a", STRUCTURED), admit("b", GREEDY)]), {"a": [1]})
    step(runner, plan({"a": 1, "b": 1}), {"a": [1]})
    run(runner, plan({"b": 1}, finished_req_ids={"a"}))
    used_now = {name: hits - before.get(name, 0) for name, hits in used(runner).items()}
    assert used_now["begin decode[4x1]"] == used_now["decode[4x1]/greedy"] == 1
    assert used_now["finish[4]/greedy"] == 2
    assert runner.table.entries.keys() <= set(runner.table.programs.all())


@both_runners
def test_a_plain_request_in_the_row_of_a_structured_one_needs_no_mask(runner):
    """One row is released before, one while the new request comes in."""
    step(runner, plan({"a": 4, "b": 4}, [admit("a", STRUCTURED), admit("b", STRUCTURED)]), {"a": [1], "b": [1]})
    rows = {runner.rows["a"], runner.rows["b"]}
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    run(runner, plan({"c": 4, "d": 4}, [admit("c", GREEDY), admit("d", GREEDY)], finished_req_ids={"b"}))
    assert {runner.rows["c"], runner.rows["d"]} == rows


@both_runners
def test_a_plain_step_uploads_no_mask(runner):
    """What forbids nothing is put on the device once for each size of a batch."""
    seen = []
    call = runner.table.call
    runner.table.call = lambda entry, *args: seen.append((entry.program.kind, args)) or call(entry, *args)
    try:
        run(runner, plan({"a": 4}, [admit("a", GREEDY)]))
        run(runner, plan({"a": 1, "b": 4}, [admit("b", GREEDY)]))
    finally:
        del runner.table.call
    first, second = (args[3] for kind, args in seen if kind == "finish")
    assert first is second is runner.masks.free[4]
    assert (np.asarray(first) == ~np.uint32(0)).all()


def test_masks_are_recorded_and_replayed(runner, tmp_path):
    with FlightRecorder(runner, tmp_path / "r"):
        step(runner, plan({"a": 4, "b": 4}, [admit("a", STRUCTURED), admit("b", GREEDY)]), {"a": [99]})
        step(runner, plan({"a": 1, "b": 1}), {"a": [98]})
        run(runner, plan({"b": 1, "c": 3}, [admit("c", GREEDY, [4, 5, 6])], finished_req_ids={"a"}))
    text = next((tmp_path / "r").glob("*/calls.jsonl")).read_text()
    assert text.count('"no_grammar"') == 1
    report = replay(tmp_path / "r", *load_tiny("llama"))
    assert report.exact, str(report)
    assert report.outputs == 3
