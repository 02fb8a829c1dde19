"""Rules of sizes: vLLM's lists exactly, and what all of this package's rules hold to."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.rules import (
    OWN,
    RULES,
    ladder_by_rule,
    linear,
    steps_of_one_and_a_half,
    v1_draft_multiples,
    vllm_sizes,
    vllm_user_sizes,
)

FIFTY_ONE = (1, 2, 4, *range(8, 249, 8), *range(256, 513, 16))


def test_vllms_default_list_has_51_sizes():
    assert len(FIFTY_ONE) == 51
    assert vllm_sizes(256) == vllm_sizes(512) == vllm_sizes(1024) == FIFTY_ONE


@pytest.mark.parametrize(
    ("seqs", "sizes"), [(1, (1, 2)), (4, (1, 2, 4, 8)), (8, (1, 2, 4, 8, 16)), (64, (1, 2, 4, *range(8, 129, 8)))]
)
def test_small_engines_have_short_lists(seqs, sizes):
    assert vllm_sizes(seqs) == sizes


def test_counts_and_ends_of_larger_engines():
    assert [(len(vllm_sizes(n)), vllm_sizes(n)[-1]) for n in (64, 128)] == [(19, 128), (35, 256)]
    blackwell = vllm_sizes(1024, cap=1024)
    assert (len(blackwell), blackwell[-1]) == (83, 1024)


def test_a_token_budget_below_the_largest_size_is_the_last_one():
    assert vllm_sizes(256, max_num_batched_tokens=100)[-3:] == (88, 96, 100)
    assert vllm_sizes(256, max_num_batched_tokens=300)[-3:] == (272, 288, 300)


def test_drafts_enlarge_a_small_engines_list():
    assert vllm_sizes(4, num_spec_tokens=3) == (1, 2, 4, 8, 16, 24, 32)


def test_interactivity_captures_every_small_size():
    assert vllm_sizes(64, interactivity=True)[:34] == (*range(1, 33), 40, 48)


def test_v1_rounds_to_multiples_of_three_and_four():
    three = v1_draft_multiples(vllm_sizes(512), 3, max_size=512)
    assert len(three) == 49
    assert three[:12] == (3, 6, 9, 18, 24, 33, 42, 48, 57, 66, 72, 81)
    assert three[-3:] == (465, 480, 498)
    four = v1_draft_multiples(vllm_sizes(512), 4, max_size=512)
    assert len(four) == 49
    assert four[:4] == (4, 8, 16, 24)
    assert four[-3:] == (480, 496, 512)
    with pytest.raises(AdmissionError, match="no multiple of 9 up to 8"):
        v1_draft_multiples((1, 2, 4, 8), 9, max_size=8)


def test_user_lists_are_made_ascending_and_cut():
    assert vllm_user_sizes([8, 1, 8, 64, 32], max_num_batched_tokens=32) == (1, 8, 32)
    with pytest.raises(AdmissionError, match="max_size 16 is not the largest"):
        vllm_user_sizes([1, 8], max_num_batched_tokens=32, max_size=16)


def test_own_rules():
    assert steps_of_one_and_a_half(30) == (1, 2, 3, 5, 8, 12, 18, 27, 30)
    assert linear(64, 4) == (16, 32, 48, 64)
    assert linear(3, 16) == (1, 2, 3)


@pytest.mark.parametrize("rule", [OWN, *RULES])
@pytest.mark.parametrize(("seqs", "tokens"), [(1, 1), (5, 35), (64, 2048), (300, 8192)])
def test_k112_every_rule_ends_at_the_exact_maximum(rule, seqs, tokens):
    """A maximum that lies on no grid is in the ladder all the same."""
    ladder = ladder_by_rule(rule, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    assert (ladder.decode[-1], ladder.mixed[-1]) == (seqs, tokens)


def test_k115_drafts_do_not_make_vllms_list_grow_without_bound():
    assert vllm_sizes(256, num_spec_tokens=24) == FIFTY_ONE


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ladder_by_rule("best", max_num_seqs=4, max_num_batched_tokens=8), "unknown rule 'best'.*1.5-steps"),
        (lambda: vllm_sizes(0), "max_num_seqs is 0"),
        (lambda: vllm_sizes(4, num_spec_tokens=-1), "num_spec_tokens is -1"),
        (lambda: linear(8, 0), "count is 0"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(AdmissionError, match=message):
        call()


def test_the_package_needs_no_jax():
    code = (
        "import sys, jaxrunner.cli.ladder, jaxrunner.ladder.study, jaxrunner.ladder.recording, jaxrunner.ladder.html, "
        "jaxrunner.ladder.trace_csv; print([m for m in ('jax', 'flax', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
