"""vLLM's CUDA-graph dispatch: what is captured, and what a step is replayed from, at two releases."""

from __future__ import annotations

import itertools

import pytest

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.dispatch import RELEASES, CudaGraphs, Graph, Mode, Support, resolve
from jaxrunner.ladder.rules import vllm_sizes

ALL = tuple(Mode)


def graphs(sizes=(1, 2, 4, 8), seqs=8, mode=Mode.FULL_AND_PIECEWISE, release="0.33", query_len=1) -> CudaGraphs:
    return CudaGraphs("graphs", tuple(sizes), seqs, mode, release, query_len)


def test_the_recorded_number_of_graphs_is_captured():
    """vLLM 0.25.1 counted 1734 for the 51 sizes of a model of 32 layers."""
    made = graphs(vllm_sizes(512), 512).start_up()
    assert (made.buckets, made.executables) == (51, 1734)


def test_a_mixed_batch_of_five_tokens_is_eager_at_one_release_and_not_at_the_next():
    """With two drafts a decode has three tokens, so the size 6 exists for decodes alone."""
    old, new = (graphs(vllm_sizes(512, num_spec_tokens=2), 512, release=r, query_len=3) for r in RELEASES)
    assert old.dispatch(2, 5, 3, 0) is None
    assert new.dispatch(2, 5, 3, 0) == Graph("piecewise", 8)
    assert old.place(2, 5, 3, 0) == ("eager", "mixed", 5)
    for both in (old, new):
        assert both.dispatch(2, 6, 3, 0) == Graph("full", 6, 2, 3)
        assert both.dispatch(1, 4, 4, 1) == Graph("piecewise", 4)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        (Mode.NONE, "eager", "eager"),
        (Mode.PIECEWISE, "piecewise", "piecewise"),
        (Mode.FULL, "full", "full"),
        (Mode.FULL_DECODE_ONLY, "full", "eager"),
        (Mode.FULL_AND_PIECEWISE, "full", "piecewise"),
    ],
)
def test_each_mode_runs_decodes_and_other_steps_its_own_way(mode, decode, mixed, release):
    ladder = graphs(mode=mode, release=release)
    assert ladder.place(3, 3, 1, 0) == (decode, "decode", 3 if decode == "eager" else 4)
    assert ladder.place(2, 3, 2, 1) == (mixed, "mixed", 3 if mixed == "eager" else 4)
    assert ladder.place(9, 9, 1, 0) == ("eager", "decode", 9), "past the last size nothing is captured"


@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_of_one_token_is_no_uniform_decode(release):
    ladder = graphs(release=release)
    assert ladder.place(3, 3, 1, 0).way == "full"
    assert ladder.place(3, 3, 1, 1) == ("piecewise", "mixed", 4)


def test_full_graphs_of_other_steps_bound_the_requests():
    assert graphs(seqs=2, mode=Mode.FULL).others == (
        Graph("full", 1, 1),
        Graph("full", 2, 2),
        Graph("full", 4, 2),
        Graph("full", 8, 2),
    )
    assert graphs(seqs=2, mode=Mode.FULL).dispatch(3, 3, 1, 0) is None


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("query_len", [1, 2, 3, 5])
def test_k113_every_captured_graph_is_found_by_a_step_of_its_own_size(mode, query_len, release):
    """The key of the look-up is the key of the capture, for each shape that is captured."""
    ladder = graphs((1, 2, 4, 8, 16, 24, 32), 8, mode, release, query_len)
    for graph in ladder.decodes:
        assert ladder.dispatch(graph.num_reqs, graph.num_tokens, query_len, 0) == graph
    for graph in ladder.others:
        assert ladder.dispatch(1, graph.num_tokens, graph.num_tokens, 1) == graph


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("query_len", [1, 3])
def test_what_is_found_holds_the_step_and_the_newer_release_finds_no_less(mode, release, query_len):
    ladder = graphs((1, 2, 4, 8, 16), 6, mode, release, query_len)
    newer = graphs((1, 2, 4, 8, 16), 6, mode, "0.33", query_len)
    for reqs, longest, prefills in itertools.product(range(1, 7), range(1, 6), (0, 1)):
        for tokens in range(reqs + longest - 1, reqs * longest + 1):
            found = ladder.dispatch(reqs, tokens, longest, prefills)
            if found is not None:
                assert found.num_tokens >= tokens
                assert found in ladder.graphs
                assert newer.dispatch(reqs, tokens, longest, prefills) is not None


def test_k114_the_older_release_takes_the_slow_graph_although_a_fast_one_is_a_little_larger():
    """Decodes of five tokens, sizes 1 to 32: three requests fit the full graph of 20 tokens."""
    old, new = (graphs((1, 2, 4, 8, 16, 32), 8, release=r, query_len=5) for r in RELEASES)
    assert [g.num_tokens for g in new.decodes] == [5, 10, 20]
    assert old.dispatch(3, 15, 5, 0) == Graph("piecewise", 16)
    assert new.dispatch(3, 15, 5, 0) == Graph("full", 20, 4, 5)


def test_k112_an_explicit_maximum_off_the_grid_loses_the_largest_decode():
    """vLLM's grid up to 35 tokens ends at 32, so a decode of 5 requests with 6 drafts finds no full graph."""
    grid = tuple(n for n in vllm_sizes(5, num_spec_tokens=6) if n <= 35)
    lost = graphs(grid, 5, query_len=7)
    assert lost.place(5, 35, 7, 0).way == "eager"
    assert graphs((*grid, 35), 5, query_len=7).place(5, 35, 7, 0) == ("full", "decode", 35)


@pytest.mark.parametrize(
    ("mode", "support", "query_len", "splitting", "resolved"),
    [
        (Mode.FULL, Support.ALWAYS, 1, True, Mode.FULL),
        (Mode.FULL, Support.UNIFORM_BATCH, 1, True, Mode.FULL_AND_PIECEWISE),
        (Mode.FULL, Support.UNIFORM_BATCH, 1, False, Mode.FULL_DECODE_ONLY),
        (Mode.FULL, Support.UNIFORM_SINGLE_TOKEN_DECODE, 3, True, Mode.PIECEWISE),
        (Mode.FULL_AND_PIECEWISE, Support.NEVER, 1, True, Mode.PIECEWISE),
        (Mode.FULL_AND_PIECEWISE, Support.NEVER, 1, False, Mode.NONE),
        (Mode.FULL_DECODE_ONLY, Support.UNIFORM_SINGLE_TOKEN_DECODE, 2, False, Mode.NONE),
        (Mode.FULL_AND_PIECEWISE, Support.UNIFORM_BATCH, 3, True, Mode.FULL_AND_PIECEWISE),
        (Mode.PIECEWISE, Support.NEVER, 1, True, Mode.PIECEWISE),
        (Mode.NONE, Support.NEVER, 1, True, Mode.NONE),
    ],
)
def test_a_mode_falls_to_what_attention_can_do(mode, support, query_len, splitting, resolved):
    found, warnings = resolve(mode, support, query_len=query_len, splitting=splitting)
    assert found is resolved
    assert bool(warnings) == (found is not mode)


def test_what_is_refused():
    with pytest.raises(AdmissionError, match="FULL needs attention"):
        resolve(Mode.FULL, Support.NEVER)
    with pytest.raises(AdmissionError, match=r"unknown release '0\.1'"):
        graphs(release="0.1")
    with pytest.raises(AdmissionError, match="ascending"):
        graphs((4, 2))
