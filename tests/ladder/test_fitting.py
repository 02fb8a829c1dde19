"""Fitted ladders: judged on halves that they have not seen, against rules of as many buckets."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import MEASURED, Costs
from jaxrunner.ladder.dispatch import CudaGraphs
from jaxrunner.ladder.fitting import candidate_rungs, fit_capture_sizes, fit_ladder, worthwhile
from jaxrunner.ladder.placement import Buckets
from jaxrunner.ladder.replay import replay
from jaxrunner.ladder.rules import OWN, ladder_by_rule, vllm_sizes
from jaxrunner.ladder.serving import Limits, steps_of
from jaxrunner.ladder.steps import Steps
from jaxrunner.ladder.trace_csv import sample_trace
from jaxrunner.ladder.traces import Trace

SIZES = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}
TRACES = {
    "sample": sample_trace,
    "light": lambda: Trace.poisson(2, 150, seed=1),
    "poisson": lambda: Trace.poisson(15, 800, seed=2),
    "heavy": lambda: Trace.poisson(40, 1500, seed=0),
    "bursty": lambda: Trace.bursty(15, 800, seed=3),
    "diurnal": lambda: Trace.diurnal(25, 2000, seed=1, period_s=20),
    "long answers": lambda: Trace.poisson(20, 900, seed=5, prompt_mean=60, output_mean=300),
}


@pytest.fixture(scope="module", params=TRACES)
def halves(request):
    own = Buckets(OWN, ladder_by_rule(OWN, **SIZES))
    return steps_of(TRACES[request.param](), own, Costs.load(MEASURED), Limits(**SIZES)).halves()


def lost(outcome) -> float:
    return outcome.cost - outcome.cost_without_padding


def check_that_it_beats_every_rule(halves, costs) -> None:
    first, second = halves
    ladders = fit_ladder(first, 90, costs, **SIZES).ladders
    for rule in (OWN, "1.5-steps", "powers-of-two", "vllm"):
        by_rule = replay(second, Buckets(rule, ladder_by_rule(rule, **SIZES)), costs)
        fitted = replay(second, ladders[by_rule.buckets - 2], costs)
        assert fitted.buckets <= by_rule.buckets
        print(f"\n{rule}, {by_rule.buckets}: {by_rule.overhead:.2%} -> {fitted.overhead:.2%}", end="")
        assert lost(fitted) < lost(by_rule), rule


def test_a_fitted_ladder_beats_every_rule_of_as_many_buckets_on_the_other_half(halves):
    check_that_it_beats_every_rule(halves, Costs.load(MEASURED))


@pytest.mark.parametrize("halves", ["sample", "bursty"], indirect=True)
def test_a_ladder_fitted_to_waste_few_tokens_wastes_fewer_than_every_rule(halves):
    check_that_it_beats_every_rule(halves, Costs.tokens())


def test_fitted_capture_sizes_beat_vllms_51_on_the_other_half(halves):
    first, second = halves
    costs = Costs.load(MEASURED)
    vllm = CudaGraphs("vllm", vllm_sizes(256), 256)
    sizes = fit_capture_sizes(first, 51, costs, max_num_seqs=256, largest=512)
    assert len(sizes) <= 51
    assert sizes[-1] == 512
    fitted = dataclasses.replace(vllm, capture_sizes=sizes)
    assert lost(replay(second, fitted, costs)) < lost(replay(second, vllm, costs))


def decodes(*sizes: int) -> Steps:
    n = np.array(sizes)
    return Steps(np.arange(len(n)), n, n, np.ones_like(n), np.zeros_like(n), n * 10)


def test_the_last_rungs_are_the_exact_maxima_whatever_was_seen():
    fitted = fit_ladder(decodes(3, 3, 5)[:3], 6, Costs.tokens(), max_num_seqs=13, max_num_batched_tokens=1001)
    assert (fitted.ladder.decode[-1], fitted.ladder.mixed[-1]) == (13, 1001)
    assert [len(x.decode) + len(x.mixed) for x in fitted.ladders] == [2, 3, 4, 5, 6]


def test_sizes_that_occur_become_rungs():
    fitted = fit_ladder(decodes(*[7] * 500, *[31] * 500), 4, Costs.tokens(), max_num_seqs=64, max_num_batched_tokens=64)
    assert {7, 31} <= set(fitted.ladder.decode)


def test_more_buckets_never_cost_more_on_what_was_fitted():
    steps = decodes(*np.random.default_rng(0).integers(1, 60, 400))
    fitted = fit_ladder(steps, 12, Costs.tokens(), max_num_seqs=64, max_num_batched_tokens=256)
    costs = [replay(steps, ladder, Costs.tokens()).cost for ladder in fitted.ladders]
    assert costs[-1] < costs[0]
    assert all(b <= a * 1.02 for a, b in itertools.pairwise(costs)), "smoothing may cost a little, not more"


def test_long_axes_have_a_grid_and_their_exact_end():
    rungs = candidate_rungs(1001)
    assert rungs[:512].tolist() == list(range(1, 513))
    assert rungs[512:].tolist() == [*range(520, 1001, 8), 1001]
    assert candidate_rungs(3).tolist() == [1, 2, 3]
    assert candidate_rungs(512)[-1] == 512


def test_how_many_buckets_pay_depends_on_how_long_they_are_used():
    cost, make = [10.0, 6.0, 5.5, 5.4], [10.0, 20.0, 30.0, 40.0]
    assert [worthwhile(cost, make, 10.0, horizon) for horizon in (1, 100, 1000, 10_000)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fit_ladder(decodes(2), 1, Costs.tokens(), **SIZES), "not 1 in all"),
        (lambda: fit_ladder(decodes(2)[:0], 4, Costs.tokens(), **SIZES), "no steps"),
        (lambda: fit_ladder(decodes(9), 4, Costs.tokens(), max_num_seqs=8, max_num_batched_tokens=64), "9 requests"),
        (lambda: fit_capture_sizes(decodes(9), 4, Costs.tokens(), max_num_seqs=9, largest=8), "no step has 8 tokens"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(AdmissionError, match=message):
        call()
