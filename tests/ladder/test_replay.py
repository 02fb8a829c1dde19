"""Replay and comparison: what is counted, against loops in Python; and the whole study."""

from __future__ import annotations

import numpy as np
import pytest

import jaxrunner
from jaxrunner.compile.ladder import Ladder
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import MEASURED, Costs, Curve
from jaxrunner.ladder.dispatch import CudaGraphs, Mode
from jaxrunner.ladder.placement import Buckets
from jaxrunner.ladder.replay import compare, replay
from jaxrunner.ladder.serving import Limits, serve
from jaxrunner.ladder.steps import Steps
from jaxrunner.ladder.study import study
from jaxrunner.ladder.traces import Trace

LINE = Curve((1, 2), (1.0, 2.0))
PRICES = Costs("prices", LINE, Curve((1, 2), (10.0, 20.0)), per_key=0.5)
STEPS = Steps(
    start_s=np.arange(5.0),
    num_reqs=[3, 8, 2, 1, 2],
    num_tokens=[3, 8, 9, 40, 2],
    max_query_len=[1, 1, 8, 40, 1],
    num_prefills=[0, 0, 1, 1, 0],
    context_tokens=[30, 80, 9, 40, 20],
)
LADDER = Ladder((1, 4, 8), (16, 64), (8,))


def test_padding_and_cost_are_those_of_each_step():
    outcome = replay(STEPS, Buckets("b", LADDER), PRICES)
    padded = [4, 8, 16, 64, 4]
    assert outcome.padded_tokens == sum(padded)
    assert outcome.real_tokens == 62
    assert outcome.waste == pytest.approx(1 - 62 / 96)
    keys = 0.5 * 179
    assert outcome.cost == pytest.approx(4 + 8 + 160 + 640 + 4 + keys)
    assert outcome.cost_without_padding == pytest.approx(3 + 8 + 90 + 400 + 2 + keys)
    assert outcome.ways == {"bucket": 5, "miss": 0, "full": 0, "piecewise": 0, "eager": 0}


def test_sizes_past_a_ladder_of_the_users_are_misses_each_counted_once():
    short = Ladder((1, 4), (8,), (4,))
    outcome = replay(STEPS, Buckets("short", short), PRICES)
    assert outcome.ways["miss"] == 3
    assert outcome.misses == 3, "a decode of 8, ragged steps of 9 and of 40"
    doubled = Steps(*(np.tile(getattr(STEPS, n), 2) for n in Steps.__dataclass_fields__))
    assert replay(doubled, Buckets("short", short), PRICES).misses == 3
    assert outcome.padded_tokens == 4 + 8 + 9 + 40 + 4


@pytest.mark.parametrize(
    ("mode", "ways"),
    [
        (Mode.NONE, {"full": 0, "piecewise": 0, "eager": 5}),
        (Mode.PIECEWISE, {"full": 0, "piecewise": 4, "eager": 1}),
        (Mode.FULL_DECODE_ONLY, {"full": 3, "piecewise": 0, "eager": 2}),
        (Mode.FULL_AND_PIECEWISE, {"full": 3, "piecewise": 1, "eager": 1}),
        (Mode.FULL, {"full": 4, "piecewise": 0, "eager": 1}),
    ],
)
def test_eager_falls_are_counted_by_mode(mode, ways):
    outcome = replay(STEPS, CudaGraphs("g", (1, 2, 4, 8, 16), 8, mode), PRICES)
    assert outcome.ways == {"bucket": 0, "miss": 0, **ways}
    assert outcome.lower_bound == (ways["eager"] > 0)
    eager_is_unpadded = replay(STEPS, CudaGraphs("g", (), 8, mode), PRICES)
    assert eager_is_unpadded.padded_tokens == eager_is_unpadded.real_tokens
    assert eager_is_unpadded.overhead == 0


def test_the_public_names_compare_a_trace():
    trace = jaxrunner.Trace.poisson(rate=10, n=60, seed=0)
    ladders = [jaxrunner.Ladder.powers_of_two(64, 2048), Buckets("every 8", Ladder((8, 64), (64, 2048), (64,)))]
    compared = jaxrunner.compare(trace, ladders, limits=Limits(64, 2048))
    assert [o.name for o in compared.outcomes] == ["ladder 1", "every 8"]
    assert compared["every 8"].padded_tokens > compared["ladder 1"].padded_tokens
    assert compared["every 8"].steps == compared["ladder 1"].steps
    header, *lines = compared.table().splitlines()
    assert header.split()[:3] == ["ladder", "buckets", "programs"]
    assert len(lines) == 2


def test_a_closed_loop_serves_the_trace_with_each_ladder():
    trace = Trace.poisson(30, 120, seed=0)
    wasteful = Buckets("wasteful", Ladder((64,), (2048,), (64,)))
    fine = Buckets("fine", Ladder.powers_of_two(64, 2048))
    open_loop, closed = (
        compare(trace, [fine, wasteful], limits=Limits(64, 2048), closed_loop=c) for c in (False, True)
    )
    assert open_loop["wasteful"].steps == open_loop["fine"].steps
    assert closed["wasteful"].steps < closed["fine"].steps, "slower steps find more requests waiting"
    costs = Costs.load(MEASURED)
    expected = serve(trace, wasteful, costs, Limits(64, 2048), drain=False)
    assert closed["wasteful"].cost == pytest.approx(expected.step_s.sum())


def test_a_study_of_recorded_steps_judges_everything_on_the_second_half():
    rng = np.random.default_rng(0)
    n = rng.integers(1, 9, 400)
    steps = Steps(np.arange(400) / 100, n, n, np.ones(400), np.zeros(400), n * 50)
    made = study(steps, limits=Limits(16, 256))
    assert made.title == "recorded steps"
    assert len(made.first) == len(made.second) == 200
    assert {o.steps for o in made.comparison.outcomes} == {200}
    assert all(pair.fitted.buckets <= pair.rule.buckets for pair in made.pairs)
    assert [o.buckets for o in made.frontier][:3] == [2, 3, 4]
    assert len(made.pairs_table().splitlines()) == len(made.pairs) + 1
    assert made.best(1e9).overhead <= made.best(1.0).overhead


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: replay(STEPS[:0], LADDER, PRICES), "no steps to replay"),
        (lambda: compare(STEPS, []), "at least one ladder"),
        (lambda: compare(STEPS, [LADDER], closed_loop=True), "closed loop needs a trace"),
        (lambda: study(STEPS), "5 steps are too few"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(AdmissionError, match=message):
        call()
