"""Buckets and ladders: plain data, exact maxima, and one pick per step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrunner import Bucket, DeviceRunner, Ladder, RunnerConfig, StepInput
from jaxrunner.compile.ladder import MAX_EXECUTABLES, geometric, halves
from jaxrunner.errors import CapacityError
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import abstract_weights
from jaxrunner.state.block_tables import KVGroup

MODEL = Model("LlamaForCausalLM", 64, 16, 32, 2, 1, 8, (LayerSpec(),))


def inputs(*counts: int, tier="greedy") -> StepInput:
    rows = np.arange(1, len(counts) + 1, dtype=np.int32)
    zero = np.zeros(len(counts), np.int32)
    return StepInput(rows, np.array(counts, np.int32), zero, (KVGroup((0,)),), tier=tier)


def test_the_last_rung_is_the_exact_maximum():
    assert geometric(1, 35, 2) == (1, 2, 4, 8, 16, 32, 35)
    assert geometric(16, 16, 4) == (16,)
    assert geometric(16, 7, 4) == (7,)


def test_k112_the_largest_decode_batch_is_in_the_ladder():
    ladder = Ladder.default(MODEL, max_num_seqs=35)
    assert ladder.pick(inputs(*[1] * 35)) == Bucket("decode", 35, 35)


def test_ragged_rungs_halve_down_from_the_exact_maximum_():
    assert halves(256, 16, 9) == (16, 32, 64, 128, 256)
    assert halves(8192, 64, 6) == (64, 256, 1024, 2048, 4096, 8192)
    assert halves(8192, 64, 4) == (128, 512, 2048, 8192)
    assert halves(300, 16, 9) == (16, 24, 40, 80, 152, 300)
    assert halves(7, 16, 4) == (7,)
    assert halves(512, 16, 1) == (512,)


@pytest.mark.parametrize(
    ("seqs", "rungs"), [(1, (1,)), (2, (1, 2)), (8, (1, 4, 8)), (64, (1, 8, 64)), (256, (16, 256))]
)
def test_second_halves_exist_for_three_sizes(seqs, rungs):
    """Of many requests for two: a single one then runs among padding."""
    ladder = Ladder.default(MODEL, max_num_seqs=seqs)
    assert ladder.finish_rungs("greedy") == ladder.finish_rungs("random") == rungs
    for tier in ("logprobs", "filtered", "constrained", "full"):
        assert ladder.finish_rungs(tier) == (rungs if seqs < 64 else rungs[-2:])


@pytest.mark.parametrize(("seqs", "two"), [(256, 2), (257, 4), (512, 4), (1024, 4)])
@pytest.mark.parametrize("tokens", [2048, 8192])
def test_decodes_of_many_requests_are_one_executable_and_no_executable_is_one_too_many(seqs, two, tokens):
    model = dataclasses.replace(MODEL, max_position_embeddings=8192)
    ladder = Ladder.default(model, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    config = RunnerConfig(seqs, 8192, tokens, 1024, 32)
    programs = DeviceRunner.programs_of(model, abstract_weights(model), config, ladder)
    assert all(programs.first(ladder.decode_bucket(n, "greedy")).kind == "step" for n in ladder.decode)
    assert ladder.pick(inputs(1, 1)).num_reqs == two
    assert len(programs.all()) <= MAX_EXECUTABLES


def test_pick_takes_the_smallest_that_fits():
    ladder = Ladder.default(MODEL, max_num_seqs=8, max_num_batched_tokens=256)
    assert ladder.pick(inputs(1, 1, 1)) == Bucket("decode", 4, 4)
    assert ladder.pick(inputs(1, 1, 5)) == Bucket("mixed", 16, 8, 16)
    assert ladder.pick(inputs(2)) == Bucket("mixed", 16, 8, 16)
    assert ladder.pick(inputs(1, 16, tier="random")) == Bucket("mixed", 32, 8, 32, "random")
    assert ladder.pick(inputs(129)) == Bucket("mixed", 256, 8, 256)


def test_pick_past_the_last_rung_names_the_limit():
    ladder = Ladder.default(MODEL, max_num_seqs=2, max_num_batched_tokens=32)
    with pytest.raises(CapacityError, match="ends at 2"):
        ladder.pick(inputs(1, 1, 1))
    with pytest.raises(CapacityError, match="ends at 32"):
        ladder.pick(inputs(33))
    with pytest.raises(CapacityError, match="without tokens"):
        ladder.pick(inputs())


def test_k113_every_step_that_fits_finds_a_bucket_it_can_be_packed_into():
    """The key of look-up equals the key of compilation: every pick is one of the ladder's buckets, and packs."""
    ladder = Ladder.default(MODEL, max_num_seqs=6, max_num_batched_tokens=50)
    listed = {b.replace(tier="greedy") for b in ladder.buckets()}
    rng = np.random.default_rng(0)
    for _ in range(300):
        n = int(rng.integers(1, 7))
        counts = [1] * n if rng.random() < 0.5 else rng.integers(1, 50 // n + 1, n).tolist()
        step = inputs(*counts)
        bucket = ladder.pick(step)
        assert bucket in listed
        assert step.pack(bucket).shape == (step.layout(bucket).size,)


def test_pairs_that_cannot_occur_do_not_exist():
    for bucket in Ladder.default(MODEL, max_num_seqs=64, max_num_batched_tokens=2048).buckets():
        assert bucket.num_reqs <= bucket.num_tokens
    with pytest.raises(ValueError, match="cannot share"):
        Bucket("mixed", 4, 5)
    with pytest.raises(ValueError, match="num_reqs"):
        Bucket("decode", 8, 4, 1)
    with pytest.raises(ValueError, match="unknown"):
        Bucket("mixed", 4, 4, 4, "best")


def test_packing_into_a_bucket_that_does_not_fit_names_it():
    with pytest.raises(CapacityError, match=r"decode\[2x1\]"):
        inputs(1, 1, 1).pack(Bucket("decode", 2, 2))
    with pytest.raises(CapacityError, match="mixed bucket"):
        inputs(1, 3).pack(Bucket("decode", 4, 4))


def test_rungs_must_ascend_and_agree():
    with pytest.raises(ValueError, match="ascending"):
        Ladder(decode=(2, 1), mixed=(8,), finish=(1,))
    with pytest.raises(ValueError, match="end at"):
        Ladder(decode=(1, 4), mixed=(8,), finish=(1, 2))
