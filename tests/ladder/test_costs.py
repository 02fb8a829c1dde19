"""Costs: what lies between measured buckets, and what a report must hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrunner.compile.buckets import TIERS
from jaxrunner.compile.ladder import Ladder
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import MEASURED, PEER, Costs, Curve, shipped
from jaxrunner.ladder.dispatch import CudaGraphs
from jaxrunner.ladder.placement import Buckets
from jaxrunner.ladder.rules import vllm_sizes

ROWS = [
    {
        "name": "a",
        "kind": "decode",
        "size": 1,
        "context": 100,
        "value": 2.0,
        "make_s": 5.0,
        "code_bytes": 10,
        "temp_bytes": 3,
    },
    {
        "name": "b",
        "kind": "decode",
        "size": 9,
        "context": 100,
        "value": 6.0,
        "make_s": 7.0,
        "code_bytes": 12,
        "temp_bytes": 9,
    },
    {"name": "c", "kind": "mixed", "size": 64, "value": 20.0, "make_s": 9.0, "code_bytes": 14, "temp_bytes": 50},
    {"name": "d", "kind": "mixed", "size": 8, "value": None, "error": "out of memory"},
    {"name": "e", "kind": "mixed", "size": 8, "value": 9.0, "void": "compiled"},
    {"name": "timeline/x", "lane": "host", "value": 3.0},
]
CONDITIONS = {"ns_per_key": 1000.0, "other_s": 0.5}


def costs(rows=ROWS, **conditions) -> Costs:
    return Costs.from_rows(rows, CONDITIONS | conditions, name="test")


def test_lines_between_points_and_beyond_the_last():
    curve = Curve.of([(8, 4.0), (2, 1.0), (4, 2.0)])
    np.testing.assert_allclose(curve([1, 2, 3, 6, 8, 12]), [1, 1, 1.5, 3, 4, 6])


def test_a_single_point_grows_in_proportion():
    np.testing.assert_allclose(Curve((4,), (2.0,))([1, 4, 8]), [2, 2, 4])


def test_noise_that_makes_a_larger_bucket_cheaper_is_levelled():
    points = [(1, 2.0), (2, 1.5), (4, 3.0)]
    np.testing.assert_allclose(Curve.of(points, rising=True)([1, 2, 4]), [2, 2, 3])
    np.testing.assert_allclose(Curve.of(points)([1, 2, 4]), [2, 1.5, 3])


def test_a_falling_curve_does_not_fall_below_its_last_point():
    np.testing.assert_allclose(Curve.of([(1, 2.0), (2, 1.0)])([2, 50]), [1, 1])


def test_keys_are_taken_out_of_the_measured_steps_and_counted_in_others():
    measured = costs()
    np.testing.assert_allclose(measured.decode([1, 9]), [2.0e-3 - 1e-4, 6.0e-3 - 9e-4])
    assert measured.per_key == pytest.approx(1e-6)


def test_a_ragged_step_costs_no_less_than_a_decode_of_as_many_tokens():
    measured = costs()
    np.testing.assert_allclose(measured.mixed([1, 9, 64]), [1.9e-3, 5.1e-3, 20e-3])


def test_void_and_failed_rows_do_not_count():
    assert costs().mixed.sizes == (1, 9, 64)


def test_start_up_of_executables():
    """Two decodes, each fused and as a first half, one ragged; then 1 rung a tier, admissions, moves, prompts."""
    scheme = Buckets("b", Ladder((1, 9), (64,), (9,)))
    seconds, held = costs().start_up(scheme)
    assert seconds == pytest.approx(2 * (5 + 7) + 9 + (len(TIERS) + 5) * 0.5)
    assert held == pytest.approx(2 * (10 + 12) + 14 + 50)


def test_executables_made_at_the_same_time_are_priced_by_the_clock():
    """5 + 7 + 9 s of three buckets and 2 x 0.5 s of others were 11 s by the clock: half of their sum."""
    warm_up = {"name": "start-up/on", "value": 11.0, "executables": 5, "buckets": 3}
    rows = [*({"variant": "on"} | row for row in ROWS), warm_up]
    alone, together = costs(), costs(rows, variant="on")
    scheme = Buckets("b", Ladder((1, 9), (64,), (9,)))
    assert together.start_up(scheme)[0] == pytest.approx(alone.start_up(scheme)[0] / 2)
    assert together.start_up(scheme)[1] == alone.start_up(scheme)[1]


def test_a_scheme_without_executables_of_its_own_needs_no_temporary():
    assert costs().start_up(CudaGraphs("g", vllm_sizes(8), 8))[1] == 0.0


def test_start_up_of_graphs_is_by_their_number():
    """The peer's record: 1734 graphs in 5 s and 0.98 GiB, after 21.2 s of compilation."""
    seconds, held = Costs.load(PEER).start_up(CudaGraphs("g", vllm_sizes(512), 512))
    assert seconds == pytest.approx(26.2, abs=0.01)
    assert held / 2**30 == pytest.approx(0.98, abs=0.001)


def test_what_was_not_measured_has_no_cost():
    assert Costs.tokens().start_up(Buckets("b", Ladder((1,), (2,), (1,)))) == (None, None)
    no_bytes = [{k: v for k, v in r.items() if k != "code_bytes"} for r in ROWS]
    assert costs(no_bytes).start_up(Buckets("b", Ladder((1,), (64,), (1,))))[1] is None


@pytest.mark.parametrize("name", [MEASURED, PEER])
def test_shipped_measurements_are_there(name):
    assert name in shipped()
    loaded = Costs.load(name)
    assert loaded.unit == "s"
    assert loaded.decode.sizes[:2] == (1, 8)
    assert 1e-3 < loaded.decode(256) < loaded.mixed(8192) < 1
    assert (np.diff(loaded.mixed(np.arange(1, 8193))) >= 0).all()


def test_variants_are_chosen_by_name(tmp_path):
    rows = [
        {**r, "variant": v, "value": r["value"] and r["value"] * f} for v, f in (("on", 1), ("off", 2)) for r in ROWS
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"conditions": {**CONDITIONS, "variant": "on"}, "rows": rows}))
    on, off = Costs.load(path), Costs.load(path, variant="off")
    assert on.mixed(64) * 2 == off.mixed(64) == pytest.approx(0.04)
    assert [(c.name, float(c.mixed(64))) for c in on.variants()] == [
        ("report, on", float(on.mixed(64))),
        ("report, off", float(off.mixed(64))),
    ]
    with pytest.raises(AdmissionError, match=r"variant 'half'.*\['off', 'on'\]"):
        Costs.load(path, variant="half")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "is no report"), ("no", "is no report"), ('{"rows": [], "conditions": {}}', "no bucket was measured")],
)
def test_what_is_no_report_is_named(tmp_path, text, message):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(AdmissionError, match=message):
        Costs.load(tmp_path / "r.json")
    with pytest.raises(AdmissionError, match=f"nothing is no file; shipped measurements are.*{MEASURED}"):
        Costs.load("nothing")


def test_one_kind_alone_is_not_enough():
    with pytest.raises(AdmissionError, match="one kind alone"):
        costs(ROWS[:2])


@pytest.mark.parametrize("points", [[], [(1, 1.0), (1, 2.0)], [(1, -1.0)], [(0, 1.0)], [(1, float("nan"))]])
def test_what_is_no_curve_is_refused(points):
    with pytest.raises(AdmissionError, match="distinct sizes"):
        Curve.of(points)
