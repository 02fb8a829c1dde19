"""The simulated engine: its steps are those of the package's own scheduler, and its clock is that of the buckets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner.compile.ladder import Ladder
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import Costs, Curve
from jaxrunner.ladder.placement import Buckets
from jaxrunner.ladder.recording import step_sizes
from jaxrunner.ladder.serving import Limits, serve
from jaxrunner.ladder.steps import COLUMNS, Steps, read_steps
from jaxrunner.ladder.traces import Trace
from tests.engine.driver import Engine

EVERY = Buckets("every size", Ladder(tuple(range(1, 33)), tuple(range(1, 65)), (32,)))


def flat(seconds: float, per_key: float = 0.0) -> Costs:
    """Every step takes as long."""
    line = Curve((1, 2), (seconds, seconds))
    return Costs("flat", line, line, per_key)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(5, 24),
)
def test_steps_are_those_of_the_scheduler(requests, seqs, budget):
    """All requests are there at the begin, and the cache holds them all: sizes must agree step by step."""
    prompts, outputs = map(list, zip(*requests, strict=True))
    engine = Engine(max_num_seqs=seqs, max_model_len=64, budget=budget, num_blocks=400, prefix_caching=False)
    for i, (prompt, output) in enumerate(requests):
        engine.add(str(i), [i + 1] * prompt, output)
    engine.run()
    expected = [step_sizes(plan) for plan in engine.plans if plan.total_num_scheduled_tokens]
    trace = Trace("t", [0.0] * len(requests), prompts, outputs)
    served = serve(trace, EVERY, flat(1.0), Limits(seqs, budget, 64)).steps
    assert [tuple(getattr(served, c)[i] for c in list(COLUMNS)[1:]) for i in range(len(served))] == expected


def test_every_token_runs_once_and_times_add_up():
    trace = Trace.poisson(20, 60, seed=2, prompt_mean=30, output_mean=12)
    served = serve(trace, EVERY, flat(0.01), Limits(16, 48, 400))
    assert served.steps.num_tokens.sum() == (trace.prompt_tokens + trace.output_tokens - 1).sum()
    assert served.steps.num_tokens.max() <= 48
    assert served.steps.num_reqs.max() <= 16
    assert (served.first_token_s > 0).all()
    assert (served.finished_s >= served.first_token_s).all()
    np.testing.assert_allclose(
        served.finished_s[trace.output_tokens == 1], served.first_token_s[trace.output_tokens == 1]
    )
    gaps = np.diff(served.steps.start_s)
    assert (gaps >= 0.01 - 1e-9).all(), "a step cannot begin before the last has ended"


def test_an_idle_engine_waits_for_the_next_arrival():
    served = serve(Trace("t", [0.0, 100.0], [4, 4], [2, 2]), EVERY, flat(1.0), Limits(8, 16, 64))
    np.testing.assert_allclose(served.steps.start_s, [0, 1, 100, 101])
    np.testing.assert_allclose(served.finished_s, [2, 2])


def test_the_loop_is_closed_a_slow_ladder_meets_larger_batches():
    trace = Trace.poisson(10, 200, seed=0, prompt_mean=8, output_mean=10)
    quick, slow = (serve(trace, EVERY, flat(s), Limits(32, 64, 400)) for s in (0.005, 0.05))
    assert slow.steps.num_reqs.mean() > 2 * quick.steps.num_reqs.mean()
    assert np.median(slow.finished_s) > np.median(quick.finished_s)


def test_a_step_takes_the_time_of_the_bucket_it_is_padded_to():
    costs = Costs("c", Curve((1, 8), (1.0, 8.0)), Curve((1, 64), (1.0, 64.0)), per_key=0.25)
    ladder = Buckets("b", Ladder((2, 8), (16, 64), (8,)))
    served = serve(Trace("t", [0, 0, 0], [5, 5, 5], [3, 2, 1]), ladder, costs, Limits(8, 64, 64))
    # 15 prompt tokens in 16; then decodes of 2 and of 1 request, both in 2; keys 15, 6 + 6, 7
    np.testing.assert_allclose(served.step_s, [16 + 15 / 4, 2 + 12 / 4, 2 + 7 / 4])


def test_without_a_drain_the_simulation_ends_with_the_last_arrival():
    trace = Trace("t", [0.0, 2.5], [4, 4], [50, 50])
    served = serve(trace, EVERY, flat(1.0), Limits(8, 16, 64), drain=False)
    assert served.steps.start_s[-1] <= 2.5
    assert np.isnan(served.finished_s).all()


def test_steps_survive_a_file(tmp_path):
    steps = serve(Trace.poisson(5, 20, prompt_mean=20), EVERY, flat(0.1), Limits(8, 32, 64)).steps
    steps.write(tmp_path / "s.csv")
    read = read_steps(tmp_path / "s.csv")
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(read, name), getattr(steps, name))


def test_halves_are_all_of_it():
    steps = serve(Trace.poisson(5, 20, prompt_mean=20), EVERY, flat(0.1), Limits(8, 32, 64)).steps
    first, second = steps.halves()
    assert len(first) + len(second) == len(steps)
    assert first.start_s[-1] < second.start_s[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n", "columns .*context_tokens"), (",".join(COLUMNS) + "\n0,1,1,1,0,x\n", "line 2")],
)
def test_what_is_no_file_of_steps_is_named(tmp_path, text, message):
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(AdmissionError, match=message):
        read_steps(tmp_path / "s.csv")
    with pytest.raises(AdmissionError, match="cannot be read"):
        read_steps(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "step",
    [
        (0, 0, 1, 1, 0, 1),
        (0, 2, 1, 1, 0, 1),
        (0, 2, 5, 2, 0, 5),
        (0, 2, 3, 3, 0, 3),
        (0, 1, 2, 2, 2, 2),
        (0, 1, 2, 2, 1, 1),
    ],
)
def test_steps_that_cannot_be_are_refused(step):
    with pytest.raises(AdmissionError, match="step 1 cannot be"):
        Steps(*np.array([(0, 1, 1, 1, 0, 1), step]).T)


def test_what_is_refused():
    trace = Trace("t", [0], [4], [2])
    with pytest.raises(AdmissionError, match="needs step times"):
        serve(trace, EVERY, Costs.tokens(), Limits(8, 16, 64))
    with pytest.raises(AdmissionError, match="max_num_batched_tokens 4"):
        Limits(8, 4)
