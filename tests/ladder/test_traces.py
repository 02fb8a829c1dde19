"""Traces: generated, read from the two public formats, and the sample that comes with the package."""

from __future__ import annotations

import datetime
import importlib.resources

import numpy as np
import pytest

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.trace_csv import SAMPLE, SAMPLE_PARAMETERS, read_trace, sample_trace, write_trace
from jaxrunner.ladder.traces import Trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:47.2500000,374,44
2023-11-16 18:15:46.0000000,396,109
2023-11-16 18:16:46.5000000,91,16
"""
AZURE_WITH_ZONE = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.000000+00:00,2162,5
2024-05-10 00:00:01.500000+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
130.5,GPT-4,20,1,21,API log
"""


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "arrivals", "prompts", "outputs"),
    [
        (AZURE, [0, 1.25, 60.5], [396, 374, 91], [109, 44, 16]),
        (AZURE_WITH_ZONE, [0, 1.5], [2162, 2399], [5, 6]),
        (BURSTGPT, [0, 40, 125.5], [472, 1087, 20], [18, 230, 1]),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\n", [0], [2], [3]),
        ("\ufeffarrival_s,prompt_tokens,output_tokens\n1,2,3\n", [0], [2], [3]),
    ],
    ids=["azure", "azure with a zone", "burstgpt", "own", "byte order mark"],
)
def test_public_formats_are_read_in_order_of_arrival(tmp_path, text, arrivals, prompts, outputs):
    trace = read_trace(written(tmp_path, text))
    np.testing.assert_allclose(trace.arrival_s, arrivals)
    np.testing.assert_array_equal(trace.prompt_tokens, prompts)
    np.testing.assert_array_equal(trace.output_tokens, outputs)
    assert trace.name == "trace"


def test_requests_without_output_are_left_out_and_counted(tmp_path, caplog):
    with caplog.at_level("INFO", logger="jaxrunner"):
        read_trace(written(tmp_path, BURSTGPT))
    assert "1 of 4 requests" in caplog.text


def test_a_part_of_a_long_file(tmp_path):
    assert len(read_trace(written(tmp_path, BURSTGPT), max_requests=2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "is no request trace.*TIMESTAMP"),
        ("", "is no request trace"),
        (AZURE + "yesterday,1,2\n", "line 5.*yesterday"),
        (AZURE + "2023-11-16 18:17:00,1\n", "line 5"),
        ("Timestamp,Request tokens,Response tokens\n1,0,0\n", "no request with prompt and output"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, text, message):
    with pytest.raises(AdmissionError, match=message):
        read_trace(written(tmp_path, text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(AdmissionError, match=r"nothing\.csv"):
        read_trace(tmp_path / "nothing.csv")


def test_what_is_written_is_read_again(tmp_path):
    trace = Trace.poisson(5, 50, seed=1)
    write_trace(trace, tmp_path / "t.csv", begin=datetime.datetime(2024, 2, 29, 23, 59))
    read = read_trace(tmp_path / "t.csv")
    np.testing.assert_allclose(read.arrival_s, trace.arrival_s - trace.arrival_s[0], atol=2e-6)
    np.testing.assert_array_equal(read.prompt_tokens, trace.prompt_tokens)


def test_the_shipped_sample_is_what_its_parameters_generate(tmp_path):
    write_trace(Trace.diurnal(**SAMPLE_PARAMETERS), tmp_path / SAMPLE)
    shipped = importlib.resources.files("jaxrunner.ladder").joinpath(SAMPLE).read_text("utf-8")
    assert shipped.splitlines() == (tmp_path / SAMPLE).read_text("utf-8").splitlines()
    assert len(sample_trace()) == SAMPLE_PARAMETERS["n"]


@pytest.mark.parametrize(
    ("trace", "cv"),
    [(Trace.poisson(20, 20_000), 1.0), (Trace.bursty(20, 20_000, cv=3), 3.0)],
    ids=["poisson", "bursty"],
)
def test_arrivals_have_their_rate_and_burstiness(trace, cv):
    gaps = np.diff(trace.arrival_s)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


def test_a_diurnal_rate_swings():
    trace = Trace.diurnal(100, 40_000, period_s=40, swing=0.5)
    phase = trace.arrival_s % 40
    counts, _ = np.histogram(phase, bins=[0, 20, 40])
    assert counts[0] / counts[1] == pytest.approx((1 + 1 / np.pi) / (1 - 1 / np.pi), rel=0.06)
    assert len(trace) / trace.arrival_s[-1] == pytest.approx(100, rel=0.03)


def test_lengths_have_their_mean():
    trace = Trace.poisson(1, 20_000, prompt_mean=300, output_mean=50, output_spread=0.3)
    assert trace.prompt_tokens.mean() == pytest.approx(300, rel=0.05)
    assert trace.output_tokens.mean() == pytest.approx(50, rel=0.02)
    assert np.log(trace.output_tokens).std() == pytest.approx(0.3, rel=0.05)


def test_a_seed_gives_the_same_trace():
    a, b, c = (Trace.bursty(3, 40, seed=s) for s in (7, 7, 8))
    np.testing.assert_array_equal(a.arrival_s, b.arrival_s)
    assert (a.arrival_s != c.arrival_s).any()


def test_a_limited_trace_fits_the_context():
    trace = Trace("t", [0, 0, 0], [10, 90, 500], [5, 50, 200]).limited(max_model_len=100)
    assert (trace.prompt_tokens + trace.output_tokens).tolist() == [15, 100, 100]
    assert trace.output_tokens.tolist() == [5, 50, 99]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trace("t", [], [], []), "'t' has no requests"),
        (lambda: Trace("t", [0], [1, 2], [1]), "'t' has no requests"),
        (lambda: Trace("t", [1, 0], [1, 1], [1, 1]), "do not ascend"),
        (lambda: Trace("t", [0, 1], [1, 1], [1, 0]), "without prompt or output"),
        (lambda: Trace.poisson(0, 5), "rate 0"),
        (lambda: Trace.bursty(1, 5, cv=0), "cv 0"),
        (lambda: Trace.diurnal(1, 5, swing=2), "swing 2"),
        (lambda: Trace.poisson(1, 5, prompt=3), r"unknown options \['prompt'\]"),
        (lambda: Trace.poisson(1, 5, prompt_mean=0), "mean length of 0"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(AdmissionError, match=message):
        make()
